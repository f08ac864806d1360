from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
from contextlib import aclosing
from pathlib import Path

import pytest
import uvloop

from loraplex.adapters.errors import ObjectNotFound, StoreUnavailable
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Tier
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import EngineUnavailable, InvalidParameter, UnsupportedModel
from loraplex.engine.messages import (
    ErrorInfo,
    EvictionReceipt,
    FinishReason,
    RequestStarted,
    TokensGenerated,
)
from loraplex.engine.process import engine_process
from loraplex.engine.process.adapter_fetches import FetchedBlock
from loraplex.engine.process.client import EngineClient
from support.fake_client import (
    FAKE_ENGINE,
    TIMEOUT_SECONDS,
    Block,
    collect,
    end_of,
    error_of,
    fetch_at_once,
    kill,
    make_request,
    running,
    submit_started,
    tokens_of,
    until,
)
from support.fake_engine import (
    BASE_ID_FILE,
    EXIT,
    EXIT_FILE,
    FAIL_FILE,
    GARBLE,
    HANG,
    QUEUE,
    RAISE,
    count_lives,
)

RESTARTED = "engine_restarted"


# --- requests -------------------------------------------------------------------------------------


def test_a_requests_events_arrive_in_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            assert client.is_ready
            assert client.info.base_id == "base"
            events = await collect(client.generate(make_request("r", [7, 8], max_tokens=3)))
            assert isinstance(events[0], RequestStarted)
            assert tokens_of(events) == [7, 8, 7]
            assert end_of(events).reason is FinishReason.LENGTH
            assert client.stats is not None
            assert client.stats.num_running == 1
            assert client.num_open_requests == 0

    asyncio.run(scenario())


def test_tokens_that_were_drafted_arrive_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            request = make_request("r", [7, 8, 9], max_tokens=6, num_draft_tokens=3)
            stream = client.submit(request)
            events = [event async for event in stream if isinstance(event, TokensGenerated)]
            assert [event.token_ids for event in events] == [[7], [8, 9, 7, 8], [9]]
            assert [event.num_draft_tokens for event in events] == [0, 3, 0]
            assert stream.num_generated_tokens == 6

    asyncio.run(scenario())


def test_runs_on_the_servers_event_loop(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            stream = await submit_started(client, make_request("r", HANG))
            kill(client)
            assert error_of(await collect(stream)).code == RESTARTED
            await until(lambda: client.is_ready)
            assert tokens_of(await collect(client.submit(make_request("r", [5])))) == [5] * 4

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_a_slow_consumer_holds_up_nobody_and_loses_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            slow = client.submit(make_request("slow", [1], max_tokens=3000))
            for index in range(50):
                fast = await collect(client.submit(make_request(f"fast-{index}", [2])))
                assert tokens_of(fast) == [2] * 4
            assert tokens_of(await collect(slow)) == [1] * 3000

    asyncio.run(scenario())


def test_a_stream_that_is_never_read_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            client.submit(make_request("abandoned", [1], max_tokens=100))
            client.generate(make_request("never entered", [1]))
            await until(lambda: client.num_open_requests == 0)

    asyncio.run(scenario())


def test_leaving_the_iteration_aborts_the_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            async with aclosing(client.generate(make_request("r", HANG))) as events:
                await anext(events)
            await until(lambda: client.num_open_requests == 0)
            assert client.num_restarts == 0

    asyncio.run(scenario())


def test_an_abort_ends_the_stream_with_its_event_and_can_be_repeated(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            stream = await submit_started(client, make_request("r", HANG))
            stream.abort()
            stream.abort()
            finished = end_of(await collect(stream))
            assert (finished.reason, finished.num_generated_tokens) == (FinishReason.ABORTED, 1)
            stream.abort()
            await stream.aclose()
            await stream.aclose()
            assert await collect(stream) == []

    asyncio.run(scenario())


def test_closing_wakes_a_waiting_reader(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            stream = await submit_started(client, make_request("r", HANG))
            reader = asyncio.create_task(collect(stream))
            await asyncio.sleep(0)
            await stream.aclose()
            assert await reader == []

    asyncio.run(scenario())


def test_a_request_id_in_use_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            stream = await submit_started(client, make_request("r", HANG))
            with pytest.raises(InvalidParameter, match="in use"):
                client.submit(make_request("r", [1]))
            await stream.aclose()
            await until(lambda: client.num_open_requests == 0)
            await collect(client.submit(make_request("r", [1])))

    asyncio.run(scenario())


# --- adapters -------------------------------------------------------------------------------------


def test_a_request_that_cannot_be_sent_is_not_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            request = make_request("r", [2**70], deadline_seconds=0.01)
            with pytest.raises(OverflowError):
                client.submit(request)
            assert client.num_open_requests == 0
            assert tokens_of(await collect(client.submit(make_request("r", [5])))) == [5] * 4

    asyncio.run(scenario())


def test_adapters_are_fetched_side_by_side(tmp_path: Path) -> None:
    async def scenario() -> None:
        all_asked = asyncio.Barrier(3)

        async def fetch(key: AdapterKey) -> FetchedBlock:
            await all_asked.wait()
            return Block(Path("/blocks") / key.digest, Tier.STORE)

        async with running(tmp_path, on_adapter_wanted=fetch) as client:
            requests = [make_request(name, [1], adapter=name) for name in ("a", "b", "c")]
            for events in await asyncio.gather(*(collect(client.submit(r)) for r in requests)):
                assert isinstance(events[0], RequestStarted)
                assert events[0].adapter_tier is Tier.STORE
                assert end_of(events).reason is FinishReason.LENGTH

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ObjectNotFound("gone"), ErrorInfo("object_not_found", "gone")),
        (StoreUnavailable("slow"), ErrorInfo("store_unavailable", "slow")),
        (
            ZeroDivisionError("an internal secret"),
            ErrorInfo(
                "adapter_load_failed",
                "The adapter's weights could not be loaded to the device.",
            ),
        ),
    ],
)
def test_a_failed_fetch_is_the_requests_error(
    tmp_path: Path, error: Exception, expected: ErrorInfo
) -> None:
    async def fetch(_key: AdapterKey) -> FetchedBlock:
        raise error

    async def scenario() -> None:
        async with running(tmp_path, on_adapter_wanted=fetch) as client:
            events = await collect(client.submit(make_request("r", [1], adapter="a")))
            assert error_of(events) == expected

    asyncio.run(scenario())


def test_an_eviction_is_awaited_and_may_be_asked_for_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            await collect(client.submit(make_request("r", [1], adapter="a")))
            key = AdapterKey("acme", "a")
            await asyncio.gather(client.evict_adapter(key), client.evict_adapter(key))
            await client.evict_adapter(key)

    asyncio.run(scenario())


def test_an_eviction_is_answered_with_its_receipt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            receipt = await client.evict_adapter(AdapterKey("acme", "a"), drain_seconds=2.5)
            assert receipt == EvictionReceipt(device_bytes=100, seconds=2.5)

    asyncio.run(scenario())


def test_pins_are_told_to_every_process_and_end_with_the_adapter(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            a, b = (AdapterKey("acme", name) for name in "ab")
            client.set_pinned([a, b])
            for _ in range(2):
                assert (await client.explain_adapter(a)).load.is_pinned
                assert (await client.explain_adapter(b)).load.is_pinned
                kill(client)
                await until(lambda: not client.is_ready)
                await until(lambda: client.is_ready)
            await client.evict_adapter(a)
            kill(client)
            await until(lambda: not client.is_ready)
            client.set_pinned([b])
            await until(lambda: client.is_ready)
            assert not (await client.explain_adapter(a)).load.is_pinned
            assert (await client.explain_adapter(b)).load.is_pinned
            client.set_pinned([])
            assert not (await client.explain_adapter(b)).load.is_pinned

    asyncio.run(scenario())


def test_a_prefetched_adapter_is_explained_as_resident(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            key = AdapterKey("acme", "a")
            assert (await client.explain_adapter(key)).load.state == "stored"
            client.prefetch(key, stay_seconds=60.0)
            while (await client.explain_adapter(key)).load.state != "resident":
                await asyncio.sleep(0.005)
            both = await asyncio.gather(client.explain_adapter(key), client.explain_adapter(key))
            assert [found.load.key for found in both] == [key, key]

    asyncio.run(scenario())


def test_there_is_no_explanation_without_an_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            kill(client)
            with pytest.raises(EngineUnavailable):
                await client.explain_adapter(AdapterKey("acme", "a"))
            assert not client.is_ready
            with pytest.raises(EngineUnavailable):
                await client.explain_adapter(AdapterKey("acme", "a"))
            await until(lambda: client.is_ready)
            assert (await client.explain_adapter(AdapterKey("acme", "a"))).load.state == "stored"

    asyncio.run(scenario())


def test_an_engine_that_is_down_holds_no_adapter(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, max_deaths=1) as client:
            await collect(client.submit(make_request("r", EXIT)))
            await client.evict_adapter(AdapterKey("acme", "a"))

    asyncio.run(scenario())


# --- the process's end ----------------------------------------------------------------------------


def test_a_killed_engine_ends_its_requests_by_code_and_serves_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            streams = [
                await submit_started(client, make_request(f"r{index}", HANG)) for index in range(3)
            ]
            first_pid = client.pid
            kill(client)
            for stream in streams:
                events = await collect(stream)
                assert error_of(events).code == RESTARTED
                assert end_of(events).num_generated_tokens == 1
            await until(lambda: client.is_ready)
            assert client.pid != first_pid
            assert (client.failure, client.num_restarts, count_lives(tmp_path)) == (None, 1, 2)
            events = await collect(client.submit(make_request("again", [5])))
            assert tokens_of(events) == [5] * 4

    asyncio.run(scenario())


def test_a_request_that_had_not_begun_is_given_to_the_next_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            waiting = client.submit(make_request("waiting", QUEUE))
            await submit_started(client, make_request("running", HANG))
            kill(client)
            events = await collect(waiting)
            assert tokens_of(events) == QUEUE * 4
            assert end_of(events).reason is FinishReason.LENGTH
            assert count_lives(tmp_path) == 2

    asyncio.run(scenario())


def test_a_request_that_had_not_begun_is_given_on_only_once(tmp_path: Path) -> None:
    async def never(key: AdapterKey) -> FetchedBlock:
        await asyncio.Event().wait()
        raise AssertionError(key)

    async def scenario() -> None:
        async with running(tmp_path, on_adapter_wanted=never) as client:
            waiting = client.submit(make_request("waiting", [5], adapter="never there"))
            for life in (1, 2):
                await until(lambda: client.is_ready and count_lives(tmp_path) == life)  # noqa: B023
                kill(client)
            assert error_of(await collect(waiting)).code == RESTARTED

    asyncio.run(scenario())


def test_an_aborted_request_is_not_given_to_the_next_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            waiting = client.submit(make_request("waiting", QUEUE))
            running_stream = await submit_started(client, make_request("running", HANG))
            kill(client)
            waiting.abort()
            assert end_of(await collect(waiting)).reason is FinishReason.ABORTED
            assert error_of(await collect(running_stream)).code == RESTARTED

    asyncio.run(scenario())


def test_an_abort_while_the_engine_is_down_ends_the_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            waiting = client.submit(make_request("waiting", QUEUE))
            await submit_started(client, make_request("running", HANG))
            kill(client)
            await until(lambda: not client.is_ready)
            waiting.abort()
            assert end_of(await collect(waiting)).reason is FinishReason.ABORTED

    asyncio.run(scenario())


def test_an_adapter_deleted_while_the_engine_is_down_ends_its_waiting_requests(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            waiting = client.submit(make_request("waiting", QUEUE, adapter="a"))
            await submit_started(client, make_request("running", HANG))
            kill(client)
            await until(lambda: not client.is_ready)
            await client.evict_adapter(AdapterKey("acme", "a"))
            assert error_of(await collect(waiting)).code == "adapter_deleted"

    asyncio.run(scenario())


def test_a_fetch_ends_with_the_process_that_wanted_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        is_cancelled = asyncio.Event()
        num_asked = 0

        async def fetch(key: AdapterKey) -> FetchedBlock:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 1:
                kill(client)
                try:
                    await asyncio.Event().wait()
                finally:
                    is_cancelled.set()
            return await fetch_at_once(key)

        async with running(tmp_path, on_adapter_wanted=fetch) as client:
            events = await collect(client.submit(make_request("r", [1], adapter="a")))
            assert end_of(events).reason is FinishReason.LENGTH
            assert is_cancelled.is_set()
            assert num_asked == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prompt", "reason"), [(RAISE, "the step failed"), (EXIT, "status 3"), (GARBLE, "status -9")]
)
def test_every_way_to_fail_is_a_death_with_a_reason(
    tmp_path: Path, prompt: list[int], reason: str
) -> None:
    async def scenario() -> None:
        async with running(tmp_path, max_deaths=1) as client:
            stream = await submit_started(client, make_request("r", HANG))
            culprit = client.submit(make_request("culprit", prompt))
            assert error_of(await collect(stream)).code == RESTARTED
            assert error_of(await collect(culprit)).code == "engine_unavailable"
            assert client.failure is not None
            assert reason in client.failure.message

    asyncio.run(scenario())


def test_a_crash_loop_leaves_the_engine_down(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, max_deaths=3) as client:
            waiting = client.submit(make_request("waiting", QUEUE))
            (tmp_path / EXIT_FILE).touch()
            kill(client)
            assert error_of(await collect(waiting)).code == "engine_unavailable"
            assert count_lives(tmp_path) == 3
            assert not client.is_ready
            assert client.failure is not None
            assert "status 3" in client.failure.message
            with pytest.raises(EngineUnavailable, match="is not running") as error:
                client.submit(make_request("late", [1]))
            assert error.value.code == "engine_unavailable"

    asyncio.run(scenario())


def test_another_base_model_behind_a_restart_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, max_deaths=2) as client:
            waiting = client.submit(make_request("waiting", QUEUE))
            (tmp_path / BASE_ID_FILE).write_text("another")
            kill(client)
            assert error_of(await collect(waiting)).code == "engine_unavailable"
            assert client.failure is not None
            assert client.failure.code == "unsupported_model"
            assert client.info.base_id == "base"

    asyncio.run(scenario())


def test_a_start_that_fails_says_why_and_is_not_repeated(tmp_path: Path) -> None:
    (tmp_path / FAIL_FILE).write_text("no such layer")

    async def scenario() -> None:
        client = EngineClient(
            EngineConfig(model=str(tmp_path)), on_adapter_wanted=fetch_at_once, command=FAKE_ENGINE
        )
        with pytest.raises(UnsupportedModel, match="no such layer"):
            await client.start()
        assert client.failure == ErrorInfo("unsupported_model", "no such layer")
        with pytest.raises(EngineUnavailable):
            _ = client.info
        await client.stop()
        assert count_lives(tmp_path) == 1

    asyncio.run(scenario())


def test_a_start_that_fails_for_a_parameter_names_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = EngineClient(
            EngineConfig(model=str(tmp_path), speculation=("ngram",)),
            on_adapter_wanted=fetch_at_once,
            command=FAKE_ENGINE,
        )
        with pytest.raises(InvalidParameter) as refused:
            await client.start()
        assert refused.value.param == "speculation"
        assert str(refused.value) == "speculation: this engine has no proposer"
        await client.stop()

    asyncio.run(scenario())


def test_a_command_that_does_not_exist_is_a_failed_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = EngineClient(
            EngineConfig(model=""),
            on_adapter_wanted=fetch_at_once,
            command=[str(tmp_path / "missing")],
        )
        with pytest.raises(EngineUnavailable, match="could not be started"):
            await client.start()
        await client.stop()

    asyncio.run(scenario())


def test_stopping_ends_the_process_and_what_is_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            stream = await submit_started(client, make_request("r", HANG))
            pid = client.pid
            assert pid is not None
            await client.stop()
            await client.stop()
            error_of(await collect(stream))
            assert (client.pid, client.is_ready) == (None, False)
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(scenario())


def test_stopping_ends_even_a_process_that_does_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "STOP_SECONDS", 0.05)

    async def scenario() -> None:
        async with running(tmp_path) as client:
            pid = client.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            await client.stop()
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(scenario())


def test_stopping_during_the_start_leaves_no_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = EngineClient(
            EngineConfig(model=str(tmp_path)), on_adapter_wanted=fetch_at_once, command=FAKE_ENGINE
        )
        start = asyncio.create_task(client.start())
        await until(lambda: client.pid is not None)
        await client.stop()
        with pytest.raises(EngineUnavailable):
            await start

    asyncio.run(scenario())


# --- the parent's end -----------------------------------------------------------------------------


def test_the_engine_dies_when_its_parent_is_killed(tmp_path: Path) -> None:
    code = f"""
        import asyncio
        from loraplex.engine.process.client import EngineClient
        from loraplex.engine.config import EngineConfig

        async def main():
            client = EngineClient(
                EngineConfig(model={str(tmp_path)!r}),
                on_adapter_wanted=None,
                command={FAKE_ENGINE!r},
            )
            await client.start()
            print(client.pid, flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as parent:
        assert parent.stdout is not None
        engine = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    readable, _, _ = select.select([engine], [], [], TIMEOUT_SECONDS)
    os.close(engine)
    assert readable, "the engine outlived its parent"
