"""Prompts that a prefill replica computes for a decode replica, and what is lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from loraplex.engine.config import EngineConfig
from loraplex.engine.fleet import handovers
from loraplex.engine.fleet.fleet import Fleet
from loraplex.engine.fleet.handover_counts import (
    WINDOW_SECONDS,
    HandoverCounts,
    HandoverFigures,
)
from loraplex.engine.fleet.handover_pace import MIN_TOKENS_TIMED, RETRY_SECONDS, HandoverPace
from loraplex.engine.fleet.handovers import FIRST_PATIENCE_SECONDS, PATIENCE, Handovers
from loraplex.engine.fleet.rendezvous import RendezvousOrder
from loraplex.engine.fleet.replica_link import ReplicaLink
from loraplex.engine.fleet.replica_state import ReplicaRole, ReplicaState, ReplicaStats
from loraplex.engine.fleet.router import RoutedRequest, Router
from loraplex.engine.kv_policy import parse_kv_policy
from loraplex.engine.messages import (
    Abort,
    FinishReason,
    GenerationRequest,
    GroupPages,
    PrefixPiece,
    PrefixTransport,
    RequestFinished,
    RequestStarted,
    Resources,
    StepEvents,
    Submit,
    ToAgent,
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
from support.small_fleet import RunningAgent, SmallFleet

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
    fleet = StandIns(p=PREFILL, d=DECODE)
    fleet.begin("r")
    passing = fleet.own
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


def test_a_prefill_replica_that_is_left_out_gets_no_prompt() -> None:
    router = router_of(p=PREFILL, q=PREFILL, d=DECODE)
    first = router.choose_prefill(asked("a", "x"), "d")
    assert first is not None
    second = router.choose_prefill(asked("b", "x"), "d", leave_out={first})
    assert {first, second} == {"p", "q"}
    assert router.choose_prefill(asked("c", "x"), "d", leave_out={"p", "q"}) is None


def test_a_link_slower_than_the_computation_is_used_once_a_minute() -> None:
    now = 0.0
    pace = HandoverPace(lambda: now)
    assert pace.pays()
    pace.note(1_000, computed=1.0, passed_on=0.5)
    assert pace.pays()
    pace.note(1_000, computed=1.0, passed_on=1.5)
    assert not pace.pays()
    now = RETRY_SECONDS
    assert pace.pays()
    pace.note(1_000, computed=1.0, passed_on=1.5)
    assert not pace.pays()


def test_the_time_of_a_token_is_that_of_the_fastest_of_the_last_prompts() -> None:
    pace = HandoverPace(lambda: 0.0)
    assert pace.token_seconds is None
    pace.note(MIN_TOKENS_TIMED - 1, computed=0.001, passed_on=0.0)
    assert pace.token_seconds is None, "most of that prompt was cached"
    for seconds in (2.0, 1.0, 3.0):
        pace.note(1_000, computed=seconds, passed_on=0.0)
    assert pace.token_seconds == pytest.approx(0.001)
    for _ in range(8):
        pace.note(1_000, computed=3.0, passed_on=0.0)
    assert pace.token_seconds == pytest.approx(0.003), "replicas change"
    pace.note_late()
    assert pace.token_seconds is None


# --- replicas that stand in -----------------------------------------------------------------------


class StandIns:
    """An API server's handovers between replicas that say what a test makes them say."""

    def __init__(self, **roles: ReplicaRole) -> None:
        self.now = 0.0
        self.sent: list[tuple[str, ToAgent]] = []
        self._timers: list[tuple[float, Callable[[], None], list[bool]]] = []
        self._router = router_of(**roles)
        self.hosts: dict[str, str] = {}
        """Those of replicas that may share memory."""
        self.own = Handovers(
            self._router,
            self._send,
            lambda name: True,
            lambda: self.now,
            self._call_later,
            lambda one, other: one in self.hosts and self.hosts[one] == self.hosts.get(other),
        )

    def source_for(self, name: str, num_tokens: int = 1_000) -> str | None:
        return self.own.source_for(long_request(name, num_tokens), asked(name), "d")

    def begin(self, name: str, source: str = "p", num_tokens: int = 1_000) -> None:
        self._router.open(asked(name), "d")
        self.own.begin(long_request(name, num_tokens), source, "d")

    def finish(
        self,
        name: str,
        *,
        computed: float = 1.0,
        passed_on: float = 0.1,
        source: str = "p",
        num_cached: int = 992,
    ) -> None:
        """The whole handover in one piece. `num_cached`: what the target found of it."""
        self.now += computed
        prefill = f"{name}/prefill"
        end = RequestFinished(prefill, FinishReason.LENGTH, 1_000, 0)
        self.own.note(source, StepEvents(finished=[end]))
        self.own.relay(source, PrefixPiece(prefill, [GroupPages([0], [b"page"])], is_last=True))
        self.now += passed_on
        started = RequestStarted(name, computed + passed_on, 0.0, None, num_cached)
        started = replace(started, prefix_wait_seconds=computed + passed_on)
        self.own.note("d", StepEvents(started=[started]))

    def wait(self, seconds: float) -> None:
        """Fires the timers of this time."""
        self.now += seconds
        due = [each for each in self._timers if each[0] <= self.now]
        self._timers = [each for each in self._timers if each[0] > self.now]
        for _, action, cancelled in due:
            if not cancelled:
                action()

    def given_up(self) -> list[str]:
        """The requests that were told to wait no longer, without pages."""
        return [
            message.request_id
            for name, message in self.sent
            if name == "d" and isinstance(message, PrefixPiece) and not message.groups
        ]

    def transport_of(self, name: str) -> PrefixTransport:
        """What the prefill replica was told of a request's pages."""
        (transport,) = [
            message.request.prefix_transport
            for _, message in self.sent
            if isinstance(message, Submit) and message.request.request_id == f"{name}/prefill"
        ]
        return transport

    def _send(self, name: str, message: ToAgent) -> bool:
        self.sent.append((name, message))
        return True

    def _call_later(self, seconds: float, action: Callable[[], None]) -> handovers.Timer:
        cancelled: list[bool] = []
        self._timers.append((self.now + seconds, action, cancelled))

        class Timer:
            def cancel(self) -> None:
                cancelled.append(True)

        return Timer()


def long_request(name: str, num_tokens: int) -> GenerationRequest:
    return GenerationRequest(name, "acme", [1] * num_tokens, SamplingParams(max_tokens=8))


def test_a_request_leaves_a_slow_prefill_replica_when_the_handover_is_not_worth_it() -> None:
    """The replica is alive and says nothing."""
    fleet = StandIns(p=PREFILL, d=DECODE)
    fleet.begin("first")
    fleet.finish("first", computed=2.0, passed_on=0.1)
    fleet.begin("slow")
    patience = PATIENCE * 2.0
    fleet.wait(patience - 0.01)
    assert fleet.given_up() == []
    fleet.wait(0.02)
    assert fleet.given_up() == ["slow"]
    assert ("p", Abort("slow/prefill")) in fleet.sent
    late = PrefixPiece("slow/prefill", [GroupPages([0], [b"page"])], is_last=True)
    num_sent = len(fleet.sent)
    fleet.own.relay("p", late)
    assert len(fleet.sent) == num_sent, "what comes later is for nobody"
    assert fleet.source_for("next") is None
    fleet.wait(RETRY_SECONDS)
    assert fleet.source_for("next") == "p"


def test_patience_grows_with_the_prompt_and_ends_with_the_handover() -> None:
    fleet = StandIns(p=PREFILL, d=DECODE)
    fleet.begin("first")
    fleet.finish("first", computed=2.0, passed_on=0.1)
    fleet.begin("long", num_tokens=3_000)
    fleet.wait(PATIENCE * 6.0 - 0.1)
    assert fleet.given_up() == []
    fleet.finish("long", computed=0.0, passed_on=0.0)
    fleet.wait(10 * FIRST_PATIENCE_SECONDS)
    assert fleet.given_up() == []


def test_the_first_prompt_has_a_fixed_patience() -> None:
    fleet = StandIns(p=PREFILL, d=DECODE)
    fleet.begin("first")
    fleet.wait(FIRST_PATIENCE_SECONDS - 0.1)
    assert fleet.given_up() == []
    fleet.wait(0.2)
    assert fleet.given_up() == ["first"]


def test_a_fast_replica_measures_the_patience_with_a_slow_one() -> None:
    fleet = StandIns(p=PREFILL, q=PREFILL, d=DECODE)
    first = fleet.source_for("any")
    assert first is not None
    (other,) = {"p", "q"} - {first}
    fleet.begin("fast", other)
    fleet.finish("fast", computed=0.5, passed_on=0.1, source=other)
    fleet.begin("slow", first)
    fleet.wait(PATIENCE * 0.5 + 0.1)
    assert fleet.given_up() == ["slow"]
    assert fleet.source_for("next") == other, "the slow one is left out, the fast one is not"


def test_one_piece_that_a_link_to_the_target_sends_slowly_is_noticed() -> None:
    """The API server has handed the piece to its link at once."""
    fleet = StandIns(p=PREFILL, d=DECODE)
    fleet.begin("first")
    fleet.finish("first", computed=1.0, passed_on=0.2)
    assert fleet.source_for("next") == "p"
    fleet.begin("slow")
    fleet.finish("slow", computed=1.0, passed_on=1.5)
    assert fleet.source_for("next") is None


@pytest.mark.parametrize(
    ("changes", "is_handed_over"),
    [
        ({}, True),
        ({"is_endless": True}, True),
        ({"adapter_start": 4}, True),
        ({"group_id": "of several choices"}, False),
        ({"kv_policy": parse_kv_policy("snapkv:64")}, False),
        ({"num_prompt_logprobs": 0}, False),
        ({"return_logits": True}, False),
        ({"is_background": True}, False),
        ({"sampling": SamplingParams(max_tokens=1)}, False),
    ],
)
def test_a_request_that_needs_more_of_its_prompt_than_the_prefix_is_not_handed_over(
    changes: dict[str, Any], is_handed_over: bool
) -> None:
    fleet = StandIns(p=PREFILL, d=DECODE)
    request = replace(long_request("any", 1_000), **changes)
    source = fleet.own.source_for(request, asked("any"), "d")
    assert source == ("p" if is_handed_over else None)


def test_what_was_cached_is_known_if_the_pages_came_before_the_events_of_their_step() -> None:
    fleet = StandIns(p=PREFILL, d=DECODE)
    fleet.begin("a")
    page = PrefixPiece("a/prefill", [GroupPages([0], [b"page"])], is_last=True)
    fleet.own.relay("p", page)
    cached = RequestStarted("a/prefill", 0.0, 0.0, None, 800)
    fleet.own.note("d", StepEvents(started=[replace(cached, num_cached_tokens=1)]))
    fleet.own.note("p", StepEvents(started=[cached]))
    started = RequestStarted("a", 0.1, 0.0, None, 992)
    assert fleet.own.as_cached(started).num_cached_tokens == 800


def test_pages_pass_through_memory_between_replicas_of_one_host_alone() -> None:
    fleet = StandIns(p=PREFILL, q=PREFILL, d=DECODE)
    fleet.hosts = {"p": "here", "q": "there", "d": "here"}
    fleet.begin("a", "p")
    fleet.begin("b", "q")
    assert fleet.transport_of("a") is PrefixTransport.MEMORY
    assert fleet.transport_of("b") is PrefixTransport.FRAMES


def test_pages_that_a_target_could_not_read_pass_through_frames_for_a_minute() -> None:
    fleet = StandIns(p=PREFILL, d=DECODE)
    fleet.hosts = {"p": "here", "d": "here"}
    fleet.begin("kept")
    fleet.finish("kept")
    fleet.begin("unread")
    fleet.finish("unread", num_cached=0)
    fleet.begin("next")
    fleet.finish("next", num_cached=0)
    fleet.wait(RETRY_SECONDS)
    fleet.begin("later")
    transports = [fleet.transport_of(name) for name in ("kept", "unread", "next", "later")]
    memory, frames = PrefixTransport.MEMORY, PrefixTransport.FRAMES
    assert transports == [memory, memory, frames, memory]


def test_a_lost_replica_comes_back_without_its_past() -> None:
    fleet = StandIns(p=PREFILL, d=DECODE)
    fleet.begin("slow")
    fleet.finish("slow", computed=1.0, passed_on=1.5)
    assert fleet.source_for("next") is None
    fleet.own.lose("p")
    assert fleet.source_for("next") == "p"


def test_handovers_are_counted_at_both_replicas_and_per_second() -> None:
    now = 100.0
    counts = HandoverCounts(lambda: now)
    assert counts.of("p") == HandoverFigures()
    for _ in range(3):
        counts.add_bytes("p", "d", 4000)
        counts.add_bytes("p", "d", 2000)
        counts.complete("p", "d")
        now += 10.0
    counts.give_up("p", "e")
    assert counts.of("d") == HandoverFigures(3, 0, 18_000, 3 / 30, 18_000 / 30)
    assert counts.of("p") == HandoverFigures(3, 1, 18_000, 3 / 30, 18_000 / 30)
    assert counts.of("e") == HandoverFigures(num_given_up=1)
    now += 15.0
    assert counts.of("d") == HandoverFigures(3, 0, 18_000, 1 / 30, 6_000 / 30)
    counts.forget("d")
    assert counts.of("d") == HandoverFigures()


def test_figures_of_handovers_take_bounded_memory() -> None:
    now = 0.0
    counts = HandoverCounts(lambda: now)
    for second in range(10_000):
        now = float(second)
        counts.add_bytes("p", "d", 30)
    assert counts.of("p").bytes_per_second == 31
    assert len(counts._counted["p"].recent) <= WINDOW_SECONDS + 1


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


def spied_transports(fleet: Fleet) -> set[PrefixTransport]:
    """By which pages travel from now on."""
    transports: set[PrefixTransport] = set()
    relay = fleet.relay

    def note(link: ReplicaLink, piece: PrefixPiece) -> None:
        transports.add(piece.transport)
        relay(link, piece)

    fleet.relay = note  # type: ignore[method-assign]
    return transports


def num_from_host(small: SmallFleet) -> int:
    """The tokens that the decode replica got from others."""
    stats = small.agents["d"].engine.stats
    return stats.num_host_cached_tokens if stats else 0


def figures(fleet: Fleet, address_part: str) -> HandoverFigures:
    """Those that the API server shows of a replica."""
    (view,) = [view for view in fleet.views() if view.id == address_part]
    return view.handovers


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
        sent, got = figures(fleet, "p"), figures(fleet, "d")
        assert sent == got
        assert (sent.num_complete, sent.num_given_up) == (1, 0)
        assert sent.complete_per_second == 1 / WINDOW_SECONDS


@pytest.mark.slow
@in_loop
async def test_a_live_prefill_replica_that_is_too_slow_costs_no_more_than_the_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handovers, "FIRST_PATIENCE_SECONDS", 0.2)
    async with prefill_and_decode(tmp_path) as (small, fleet):
        handed = spied_handovers(fleet)
        events = await collect(fleet.submit(make_request("long", NEVER_SENT)))
        assert tokens_of(events) == NEVER_SENT[:4]
        assert handed == [("long", "p", "d")]
        await until(lambda: small.agents["p"].replica.num_open == 0)
        assert settled(fleet)
        await collect(fleet.submit(make_request("next", LONG)))
        assert len(handed) == 1, "not before a minute has passed"


@in_loop
async def test_a_lost_prefill_replica_costs_nothing_but_time(tmp_path: Path) -> None:
    async with prefill_and_decode(tmp_path) as (small, fleet):
        task = await begun(fleet, make_request("long", NEVER_SENT))
        assert open_at(fleet, "d") == {"busy", "long"}
        kill(small.agents["p"].engine)
        assert tokens_of(await task) == NEVER_SENT[:4]
        assert settled(fleet)
        assert figures(fleet, "d") == HandoverFigures(num_given_up=1)


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


@pytest.mark.slow
@in_loop
async def test_a_deadline_ends_a_request_that_waits_for_its_prefix(tmp_path: Path) -> None:
    async with prefill_and_decode(tmp_path) as (_, fleet):
        events = await collect(fleet.submit(make_request("long", NEVER_SENT, deadline_seconds=0.2)))
        assert error_of(events).code == "deadline_exceeded"
        assert settled(fleet)


@pytest.mark.slow
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
            transports = spied_transports(fleet)
            streams = [fleet.submit(request) for request in requests]
            answers = await asyncio.gather(*map(collect, streams))
            await until(lambda: num_from_host(small) > 0)
            sent, got = figures(fleet, "p"), figures(fleet, "d")
        finally:
            await small.close()
    assert list(map(tokens_of, answers)) == engine.tokens(ids)
    assert handed == [(f"r{i}", "p", "d") for i in (1, 2, 3)], "the first finds an idle replica"
    assert transports == {PrefixTransport.MEMORY}, "both engines run on this machine"
    assert sent == got
    assert (got.num_complete, got.num_given_up) == (3, 0)
    # Of each prompt at least five blocks of 16 tokens; keys and values of two layers and heads.
    token_bytes = 2 * 2 * 2 * 16 * (4 if kv_dtype == "auto" else 1)
    assert 3 * 80 * token_bytes <= got.num_bytes <= 3 * 112 * 2 * token_bytes


@pytest.mark.slow
@in_loop
async def test_a_restarted_owner_gives_another_replica_a_prefix_from_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handovers, "MIN_TOKENS", 32)
    base = save_family(tmp_path / "base", *SERVED["llama"])
    config = EngineConfig(
        str(base),
        device="cpu",
        dtype="float32",
        num_threads=1,
        kv_cache_bytes=4 << 20,
        arena_bytes=4 << 20,
        host_bytes=8 << 20,
    )
    with_disk = replace(
        config, prefix_disk_bytes=8 << 20, prefix_disk_dir=str(tmp_path / "prefixes")
    )
    prompt = [3 + (7 * j + j * j) % (VOCAB_SIZE - 3) for j in range(150)]
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    small = SmallFleet(tmp_path)
    async with asyncio.timeout(300):
        try:
            owner = await small.add_agent("p", PREFILL, with_disk)
            fleet = small.add_api_server()
            await fleet.start()
            await until(lambda: is_ready(fleet, "p"))
            first = await collect(fleet.submit(GenerationRequest("a", "acme", prompt, sampling)))
            await until(lambda: num_on_disk(owner) >= len(prompt) // config.kv_block_size)
            process = owner.engine.pid
            kill(owner.engine)
            await until(lambda: owner.engine.pid not in (None, process))
            await small.add_agent("d", DECODE, config)
            await until(lambda: is_ready(fleet, "p") and is_ready(fleet, "d"))
            handed = spied_handovers(fleet)
            long = replace(sampling, max_tokens=400)
            busy = asyncio.create_task(
                collect(fleet.submit(GenerationRequest("busy", "acme", prompt[:3], long)))
            )
            await until(lambda: open_at(fleet, "d") == {"busy"})
            second = await collect(fleet.submit(GenerationRequest("b", "acme", prompt, sampling)))
            await busy
            await until(lambda: num_from_disk(owner) > 0 and num_from_host(small) > 0)
        finally:
            await small.close()
    assert handed == [("b", "p", "d")]
    assert tokens_of(second) == tokens_of(first)
    (started,) = [event for event in second if isinstance(event, RequestStarted)]
    assert started.replica == "d"
    assert started.num_cached_tokens >= 128, "the owner had them from its disk"


def is_ready(fleet: Fleet, name: str) -> bool:
    return any(link.id == name and link.state is READY for link in fleet.links)


def num_on_disk(agent: RunningAgent) -> int:
    """Blocks that the engine's process has written."""
    return agent.engine.stats.num_blocks_to_disk if agent.engine.stats else 0


def num_from_disk(agent: RunningAgent) -> int:
    return agent.engine.stats.num_blocks_from_disk if agent.engine.stats else 0
