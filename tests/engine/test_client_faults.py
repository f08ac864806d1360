"""An engine that hangs, crashes repeatedly or is overloaded, as its client handles it."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.errors import AdapterQuarantined, Overloaded, RequestQuarantined
from loraplex.engine.messages import FinishReason
from loraplex.engine.process import supervisor
from loraplex.engine.process.adapter_fetches import FetchedBlock
from loraplex.engine.process.client import EngineClient
from loraplex.engine.process.engine import EngineState
from loraplex.engine.process.request_stream import RequestEvent
from support.fake_client import (
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
from support.fake_engine import EXIT, HANG, NAN, PACE_FILE, QUEUE, STUCK, count_lives

pytestmark = pytest.mark.slow


def stop(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)


def is_gone(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# --- stalls ---------------------------------------------------------------------------------------


def test_a_stuck_engine_is_replaced_and_has_written_down_where_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with running(tmp_path, stall_seconds=0.5) as client:
            stream = await submit_started(client, make_request("running", HANG))
            pid = client.pid
            culprit = client.submit(make_request("culprit", STUCK))
            await until(lambda: client.state is EngineState.STALLED)
            assert not client.is_ready
            assert error_of(await collect(stream)).code == "engine_restarted"
            assert client.failure is not None
            assert client.failure.code == "stalled"
            assert is_gone(pid)
            assert error_of(await collect(culprit)).code == "request_quarantined"
            await until(lambda: count_lives(tmp_path) == 3)

    asyncio.run(scenario())
    assert "_advance" in capfd.readouterr().err


def test_a_stopped_engine_is_found_within_twelve_seconds_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the supervisor's own pauses, which are a tenth as long here as it asks for."""
    asked: list[float] = []
    sleep = asyncio.sleep

    async def hurried(seconds: float) -> None:
        asked.append(seconds)
        await sleep(seconds / 10)

    hurried_asyncio = SimpleNamespace(**{**vars(asyncio), "sleep": hurried})

    async def scenario() -> None:
        async with running(tmp_path) as client:
            stream = await submit_started(client, make_request("running", HANG))
            stop(client.pid)
            asked.clear()
            await until(lambda: client.state is EngineState.STALLED)
            assert 9 < sum(asked) < 12
            assert error_of(await collect(stream)).code == "engine_restarted"
            await until(lambda: client.is_ready)
            assert tokens_of(await collect(client.submit(make_request("next", [5])))) == [5] * 4

    monkeypatch.setattr(supervisor, "asyncio", hurried_asyncio)
    asyncio.run(scenario())


def test_a_stopped_engine_without_work_is_left_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, stall_seconds=1.0) as client:
            stop(client.pid)
            await asyncio.sleep(1.5)
            assert client.is_ready
            assert client.pid is not None
            os.kill(client.pid, signal.SIGCONT)
            assert tokens_of(await collect(client.submit(make_request("r", [5])))) == [5] * 4
            assert client.num_restarts == 0

    asyncio.run(scenario())


def test_a_deletion_that_a_stuck_engine_owes_is_settled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, stall_seconds=0.3) as client:
            stop(client.pid)
            await client.evict_adapter(AdapterKey("acme", "a"))
            await until(lambda: client.num_restarts == 1)

    asyncio.run(scenario())


def test_an_api_process_that_was_held_up_accuses_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, stall_seconds=1.0) as client:
            stream = await submit_started(client, make_request("r", HANG))
            stop(client.pid)
            time.sleep(1.5)  # the event loop's own
            assert client.pid is not None
            os.kill(client.pid, signal.SIGCONT)
            await asyncio.sleep(0.5)
            assert client.is_ready
            await stream.aclose()
            assert client.num_restarts == 0

    asyncio.run(scenario())


# --- quarantine -----------------------------------------------------------------------------------


def test_a_request_that_ends_the_engine_twice_is_not_taken_a_third_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            events = await collect(client.submit(make_request("poison", EXIT)))
            assert error_of(events).code == "request_quarantined"
            await until(lambda: client.is_ready)
            with pytest.raises(RequestQuarantined):
                client.submit(make_request("sent again", EXIT))
            assert tokens_of(await collect(client.submit(make_request("other", [5])))) == [5] * 4
            assert count_lives(tmp_path) == 3

    asyncio.run(scenario())


def test_who_only_waited_while_the_engine_died_is_no_suspect(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            waiting = client.submit(make_request("waiting", QUEUE))
            await submit_started(client, make_request("poison", HANG))
            kill(client)
            await until(lambda: client.num_restarts == 1)
            assert tokens_of(await collect(waiting)) == QUEUE * 4
            await submit_started(client, make_request("poison", HANG))
            kill(client)
            await until(lambda: client.num_restarts == 2 and client.is_ready)
            with pytest.raises(RequestQuarantined):
                client.submit(make_request("poison", HANG))
            await collect(client.submit(make_request("waiting", QUEUE)))

    asyncio.run(scenario())


def test_an_adapter_under_which_the_engine_dies_twice_is_kept_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            for life in (1, 2):
                request = make_request(f"r{life}", HANG, max_tokens=10 + life, adapter="bad")
                await submit_started(client, request)
                kill(client)
                await until(lambda: client.is_ready and client.num_restarts == life)  # noqa: B023
            with pytest.raises(AdapterQuarantined):
                client.submit(make_request("r", [5], adapter="bad"))
            await collect(client.submit(make_request("r", [5], adapter="good")))

    asyncio.run(scenario())


def test_of_those_who_shared_a_step_only_the_culprit_is_kept_out(tmp_path: Path) -> None:
    """As callers do who send again what broke off; the others' steps are shared with the culprit's
    again and again."""
    (tmp_path / PACE_FILE).write_text("0.02")

    async def ask(client: EngineClient, adapter: str, prompt: list[int]) -> list[RequestEvent]:
        for attempt in count():
            await until(lambda: client.is_ready)
            request = make_request(f"{adapter}-{attempt}", prompt, max_tokens=9, adapter=adapter)
            events = await collect(client.submit(request))
            if end_of(events).error is None or error_of(events).code != "engine_restarted":
                break
        return events

    async def scenario() -> None:
        async with running(tmp_path) as client:
            bad, *good = await asyncio.gather(
                ask(client, "bad", EXIT), *(ask(client, f"good{n}", [n]) for n in range(3))
            )
            assert error_of(bad).code == "adapter_quarantined"
            assert [tokens_of(events) for events in good] == [[n] * 9 for n in range(3)]
            with pytest.raises(AdapterQuarantined):
                client.submit(make_request("again", [5], adapter="bad"))
            for n in range(3):
                await collect(client.submit(make_request(f"later{n}", [5], adapter=f"good{n}")))
            assert count_lives(tmp_path) == 3, "one crash together, one alone"

    asyncio.run(scenario())


def test_an_adapter_whose_numbers_break_down_three_times_is_kept_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            for index in range(3):
                request = make_request(f"r{index}", NAN, adapter="bad")
                assert error_of(await collect(client.submit(request))).code == "numerical_error"
            with pytest.raises(AdapterQuarantined):
                client.submit(make_request("r", [5], adapter="bad"))
            assert client.num_restarts == 0

    asyncio.run(scenario())


def test_neither_process_leaves_files_behind_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    async def scenario() -> None:
        async with running(tmp_path) as client:
            await submit_started(client, make_request("running", HANG))
            assert not list(temporary.iterdir()), "so nothing is left if both are killed now"

    asyncio.run(scenario())


# --- warming up -----------------------------------------------------------------------------------


def test_resident_adapters_come_back_most_recently_used_first(tmp_path: Path) -> None:
    wanted: list[str] = []

    async def fetch(key: AdapterKey) -> FetchedBlock:
        wanted.append(key.digest)
        return await fetch_at_once(key)

    async def scenario() -> None:
        async with running(tmp_path, on_adapter_wanted=fetch) as client:
            for name in ("a", "b", "deleted", "c"):
                await collect(client.submit(make_request(name, [1], adapter=name)))
            await until(lambda: client.stats is not None and len(client.stats.adapters) == 4)
            await client.evict_adapter(AdapterKey("acme", "deleted"))
            for _ in range(2):  # the second process dies before it has said what it holds
                wanted.clear()
                kill(client)
                await until(lambda: len(wanted) == 3)
                assert wanted == ["c", "b", "a"]
                await until(lambda: client.is_ready)

    asyncio.run(scenario())


# --- bounds ---------------------------------------------------------------------------------------


def test_more_open_requests_than_the_engine_takes_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, max_queued=4) as client:
            stop(client.pid)
            streams = [client.submit(make_request(f"r{index}", [5])) for index in range(5)]
            with pytest.raises(Overloaded) as refusal:
                client.submit(make_request("late", [5]))
            assert refusal.value.retry_after_seconds == 1.0
            assert client.pid is not None
            os.kill(client.pid, signal.SIGCONT)
            for stream in streams:
                assert end_of(await collect(stream)).reason is FinishReason.LENGTH
            await collect(client.submit(make_request("late", [5])))

    asyncio.run(scenario())


def test_a_deadline_holds_even_where_the_engine_does_not_keep_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            begun_at = time.monotonic()
            late = client.submit(make_request("late", HANG, deadline_seconds=0.1))
            early = client.submit(make_request("early", [5], deadline_seconds=0.1))
            assert tokens_of(await collect(early)) == [5] * 4
            assert error_of(await collect(late)).code == "deadline_exceeded"
            assert 0.5 < time.monotonic() - begun_at < 5
            assert client.num_open_requests == 0

    asyncio.run(scenario())
