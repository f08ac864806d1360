"""Prompts that a prefill replica computes for a decode replica, and what is lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from loraplex.engine.config import EngineConfig
from loraplex.engine.fleet import handovers
from loraplex.engine.fleet.fleet import Fleet
from loraplex.engine.fleet.handover_pace import RETRY_SECONDS, HandoverPace
from loraplex.engine.fleet.rendezvous import RendezvousOrder
from loraplex.engine.fleet.replica_state import ReplicaRole, ReplicaState, ReplicaStats
from loraplex.engine.fleet.router import RoutedRequest, Router
from loraplex.engine.messages import (
    FinishReason,
    GenerationRequest,
    RequestFinished,
    RequestStarted,
    Resources,
    StepEvents,
)
from loraplex.engine.process.request_stream import RequestEvent
from loraplex.engine.sampling_params import SamplingParams
from support.engine import LocalEngine
from support.fake_client import (
    collect,
    error_of,
    kill,
    make_request,
    submit_started,
    tokens_of,
    until,
)
from support.fake_engine import HANG
from support.families import SERVED, VOCAB_SIZE, save_family
from support.small_fleet import SmallFleet

READY, REFUSING = ReplicaState.READY, ReplicaState.REFUSING
PREFILL, DECODE, BOTH = ReplicaRole.PREFILL, ReplicaRole.DECODE, ReplicaRole.BOTH
LONG = list(range(1, handovers.MIN_TOKENS + 1))
NEVER_SENT = [*HANG, *LONG]
"""Its prefix never comes."""


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test in an event loop of its own."""

    @wraps(test)
    def run(*args: Any, **others: Any) -> None:
        asyncio.run(test(*args, **others))

    return run


# --- what it costs --------------------------------------------------------------------------------


def ended(request_id: str, reason: FinishReason, used: Resources) -> RequestFinished:
    return RequestFinished(request_id, reason, len(LONG), 0, used=used)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORTED])
def test_a_request_is_charged_with_what_both_replicas_have_spent_on_it(
    reason: FinishReason,
) -> None:
    router = router_of(p=PREFILL, d=DECODE)
    passing = handovers.Handovers(router, lambda name, message: True, lambda name: True, float)
    request = make_request("r", LONG)
    router.open(asked("r"), "d")
    passing.begin(request, "p", "d")
    on_prompt, on_output = Resources(2.0, 300.0, 10, 10), Resources(5.0, 4000.0, 10, 0)
    passing.note("p", StepEvents(finished=[ended("r/prefill", reason, on_prompt)]))
    other = ended("other", FinishReason.STOP, on_output)
    assert passing.with_prefill(other) is other
    end = passing.with_prefill(ended("r", FinishReason.STOP, on_output))
    assert end.used == Resources(7.0, 4300.0, 20, 10)


# --- the choice -----------------------------------------------------------------------------------


def router_of(**roles: ReplicaRole) -> Router:
    router = Router(RendezvousOrder())
    for name, role in roles.items():
        router.set_state(name, READY, role)
        router.report(name, ReplicaStats(num_requests=1, max_batch=8, residents=set()))
    return router


def asked(name: str, adapter: str | None = None) -> RoutedRequest:
    return RoutedRequest(name, adapter)


@pytest.mark.parametrize("adapter", [None, *map(str, range(8))])
def test_a_prefill_replica_takes_requests_only_if_no_other_is_ready(adapter: str | None) -> None:
    router = router_of(p=PREFILL, d=DECODE, b=BOTH)
    for index in range(40):
        name = router.choose(asked(f"{index}", adapter))
        assert name in ("d", "b")
        router.open(asked(f"{index}", adapter), name)
    assert router.choose(asked("confined", adapter)) in ("d", "b")
    for name in ("d", "b"):
        router.set_state(name, REFUSING)
    assert router.choose(asked("alone", adapter)) == "p"
    router.set_state("d", READY, DECODE)
    assert router.choose(asked("again", adapter)) == "d"


def test_a_prompt_goes_to_a_prefill_replica_with_room_if_the_target_is_busy() -> None:
    router = router_of(p=PREFILL, q=PREFILL, d=DECODE, b=BOTH)
    first = router.choose_prefill(asked("a", "x"), "d")
    assert first in ("p", "q")
    assert router.choose_prefill(asked("b", "x"), "d") == first, "one adapter, one replica"
    assert router.choose_prefill(asked("a", "x"), "b") is None, "it computes all itself"
    assert first is not None
    for index in range(5):
        router.open(asked(f"{index}", "x"), first)
    second = router.choose_prefill(asked("c", "x"), "d")
    assert {first, second} == {"p", "q"}
    assert second is not None
    for index in range(5):
        router.open(asked(f"more-{index}", "x"), second)
    assert router.choose_prefill(asked("e", "x"), "d") is None, "none has room"
    for name in ("p", "q"):
        router.set_state(name, REFUSING)
    assert router.choose_prefill(asked("f", "x"), "d") is None
    idle = router_of(p=PREFILL, d=DECODE)
    idle.report("d", ReplicaStats(num_requests=0, max_batch=8, residents=set()))
    assert idle.choose_prefill(asked("g"), "d") is None, "an idle target delays nobody"


def test_a_link_slower_than_the_computation_is_used_once_a_minute() -> None:
    now = 0.0
    pace = HandoverPace(lambda: now)
    assert pace.pays()
    pace.note(computed=1.0, passed_on=0.5)
    assert pace.pays()
    pace.note(computed=1.0, passed_on=1.5)
    assert not pace.pays()
    now = RETRY_SECONDS
    assert pace.pays()
    pace.note(computed=1.0, passed_on=1.5)
    assert not pace.pays()


# --- a fleet of fake engines ----------------------------------------------------------------------


@asynccontextmanager
async def prefill_and_decode(folder: Path) -> AsyncIterator[tuple[SmallFleet, Fleet]]:
    """A busy decode replica, and a prefill replica."""
    small = SmallFleet(folder)
    async with asyncio.timeout(30):
        try:
            await small.add_agent("d", DECODE)
            await small.add_agent("p", PREFILL)
            fleet = small.add_api_server()
            await fleet.start()
            await until(lambda: all(link.state is READY for link in fleet.links))
            await submit_started(fleet, make_request("busy", HANG))
            assert open_at(fleet, "d") == {"busy"}
            yield small, fleet
        finally:
            await small.close()


def open_at(fleet: Fleet, name: str) -> set[str]:
    return {key for key, sent in fleet._requests._sent.items() if sent.replica == name}


def spied_handovers(fleet: Fleet) -> list[tuple[str, str, str]]:
    """The handovers from now on: request, source and target."""
    handed: list[tuple[str, str, str]] = []
    begins = fleet._requests._handovers.begin

    def begin(request: GenerationRequest, source: str, target: str) -> None:
        handed.append((request.request_id, source, target))
        begins(request, source, target)

    fleet._requests._handovers.begin = begin  # type: ignore[method-assign]
    return handed


def num_from_host(small: SmallFleet) -> int:
    """The tokens that the decode replica got from others."""
    stats = small.agents["d"].engine.stats
    return stats.num_host_cached_tokens if stats else 0


def num_open_handovers(fleet: Fleet) -> int:
    return len(fleet._requests._handovers._prefills)


def settled(fleet: Fleet) -> bool:
    """Nothing of a handover is left anywhere."""
    own = fleet._requests._handovers
    return not own._prefills and not own._of.keys() - {"busy"} and "busy" in open_at(fleet, "d")


async def begun(fleet: Fleet, request: GenerationRequest) -> asyncio.Task[list[RequestEvent]]:
    """The request waits for a prefix."""
    task = asyncio.create_task(collect(fleet.submit(request)))
    await until(lambda: num_open_handovers(fleet) == 1)
    return task


@in_loop
async def test_a_long_prompt_is_computed_elsewhere_and_billed_once(tmp_path: Path) -> None:
    async with prefill_and_decode(tmp_path) as (_, fleet):
        handed = spied_handovers(fleet)
        events = await collect(fleet.submit(make_request("long", LONG)))
        assert handed == [("long", "p", "d")]
        assert tokens_of(events) == LONG[:4]
        (started,) = [event for event in events if isinstance(event, RequestStarted)]
        assert started.replica == "d"
        assert started.num_cached_tokens == 0, "the fake engine counts its two pieces"
        await collect(fleet.submit(make_request("short", LONG[:-1])))
        await collect(fleet.submit(make_request("long again", LONG, adapter="x")))
        assert handed == [("long", "p", "d")], "short ones and unproven adapters are not"
        assert settled(fleet)


@in_loop
async def test_a_lost_prefill_replica_costs_nothing_but_time(tmp_path: Path) -> None:
    async with prefill_and_decode(tmp_path) as (small, fleet):
        task = await begun(fleet, make_request("long", NEVER_SENT))
        assert open_at(fleet, "d") == {"busy", "long"}
        kill(small.agents["p"].engine)
        assert tokens_of(await task) == NEVER_SENT[:4]
        assert settled(fleet)


@in_loop
async def test_a_prefill_engine_that_dies_before_its_last_piece_costs_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request had ended, so no event of the request says so."""
    async with prefill_and_decode(tmp_path) as (small, fleet):
        monkeypatch.setattr(fleet, "relay", lambda *_: None)
        task = await begun(fleet, make_request("long", LONG))
        (handover,) = fleet._requests._handovers._of.values()
        await until(lambda: handover.computed_at is not None)
        kill(small.agents["p"].engine)
        assert tokens_of(await task) == LONG[:4]
        assert settled(fleet)


@in_loop
async def test_a_lost_decode_replica_leaves_the_request_to_another(tmp_path: Path) -> None:
    async with prefill_and_decode(tmp_path) as (small, fleet):
        task = await begun(fleet, make_request("long", [*HANG, 5, *LONG], max_tokens=3))
        kill(small.agents["d"].engine)
        events = await task
        assert tokens_of(events) == [*HANG, 5, 1]
        (started,) = [event for event in events if isinstance(event, RequestStarted)]
        assert started.replica == "p", "the only one that is ready"
        assert num_open_handovers(fleet) == 0


@in_loop
async def test_an_aborted_request_leaves_nothing_behind(tmp_path: Path) -> None:
    async with prefill_and_decode(tmp_path) as (small, fleet):
        stream = fleet.submit(make_request("long", NEVER_SENT))
        await until(lambda: num_open_handovers(fleet) == 1)
        stream.abort()
        async for _ in stream:
            pass
        await until(lambda: small.agents["p"].replica.num_open == 0)
        assert small.agents["d"].replica.num_open == 1
        assert settled(fleet)


@in_loop
async def test_a_deadline_ends_a_request_that_waits_for_its_prefix(tmp_path: Path) -> None:
    async with prefill_and_decode(tmp_path) as (_, fleet):
        events = await collect(fleet.submit(make_request("long", NEVER_SENT, deadline_seconds=0.2)))
        assert error_of(events).code == "deadline_exceeded"
        assert settled(fleet)


@in_loop
async def test_a_target_that_does_not_keep_up_computes_the_prompt_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with prefill_and_decode(tmp_path) as (_, fleet):
        monkeypatch.setattr(fleet._requests._handovers, "_has_room", lambda name: False)
        assert tokens_of(await collect(fleet.submit(make_request("long", LONG)))) == LONG[:4]
        assert settled(fleet)


# --- real engines ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@in_loop
async def test_two_real_replicas_answer_as_one_engine(
    kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handovers, "MIN_TOKENS", 32)
    base = save_family(tmp_path / "base", *SERVED["llama"])
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "kv_dtype": kv_dtype,
        "kv_cache_bytes": 4 << 20,
        "arena_bytes": 4 << 20,
        "host_cache_bytes": 8 << 20,
        "swap_bytes": 4 << 20,
    }
    prompts = [[3 + (7 * i + j * j) % (VOCAB_SIZE - 3) for j in range(100 + i)] for i in range(4)]
    engine = LocalEngine(base, tmp_path, **settings)
    sampling = [SamplingParams(max_tokens=20, temperature=i % 2, seed=i) for i in range(4)]
    ids = [
        engine.submit(prompt, max_tokens=20, temperature=i % 2, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    engine.run()
    small = SmallFleet(tmp_path)
    config = EngineConfig(str(base), **settings)  # type: ignore[arg-type]
    async with asyncio.timeout(300):
        try:
            await small.add_agent("d", DECODE, config)
            await small.add_agent("p", PREFILL, config)
            fleet = small.add_api_server()
            await fleet.start()
            await until(lambda: all(link.state is READY for link in fleet.links))
            requests = [
                GenerationRequest(f"r{i}", "acme", prompt, sampling[i])
                for i, prompt in enumerate(prompts)
            ]
            handed = spied_handovers(fleet)
            streams = [fleet.submit(request) for request in requests]
            answers = await asyncio.gather(*map(collect, streams))
            await until(lambda: num_from_host(small) > 0)
        finally:
            await small.close()
    assert list(map(tokens_of, answers)) == engine.tokens(ids)
    assert handed == [(f"r{i}", "p", "d") for i in (1, 2, 3)], "the first finds an idle replica"
