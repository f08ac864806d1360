"""What becomes of the open requests when an engine process has died, without any process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Tier
from loraplex.engine.messages import (
    Abort,
    FinishReason,
    GenerationRequest,
    Prefetch,
    RequestFinished,
    RequestStarted,
    SetPinned,
    StepEvents,
    Submit,
    ToEngine,
    TokensGenerated,
)
from loraplex.engine.process import request_streams
from loraplex.engine.process.kept_adapters import WARM_UP_SECONDS, KeptAdapters
from loraplex.engine.process.open_requests import OpenRequests
from loraplex.engine.process.quarantine import Quarantine, crash_of
from loraplex.engine.process.request_stream import RequestEvent
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.token_journal import Counts, TokenJournal

BAD, GOOD = AdapterKey("acme", "bad"), AdapterKey("acme", "good")


class FakeSupervisor:
    """Notes what the process is sent."""

    def __init__(self) -> None:
        self.is_ready = True
        self.ready_seconds = 2 * WARM_UP_SECONDS
        self.sent: list[ToEngine] = []

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    def submitted(self) -> list[str]:
        return [sent.request.request_id for sent in self.sent if isinstance(sent, Submit)]


@pytest.fixture
def supervisor() -> FakeSupervisor:
    return FakeSupervisor()


@pytest.fixture
def quarantine() -> Quarantine:
    return Quarantine(lambda: 0.0)


@pytest.fixture
def requests(supervisor: FakeSupervisor, quarantine: Quarantine) -> OpenRequests:
    return OpenRequests(cast(Any, supervisor), quarantine, max_requests=9)


@pytest.fixture
def kept(supervisor: FakeSupervisor, quarantine: Quarantine) -> KeptAdapters:
    return KeptAdapters(cast(Any, supervisor), quarantine)


def make(
    name: str, adapter: AdapterKey | None = None, deadline: float | None = None
) -> GenerationRequest:
    return GenerationRequest(
        name, "acme", [len(name)], SamplingParams(), adapter, deadline_seconds=deadline
    )


def crash_twice_under(adapter: AdapterKey, quarantine: Quarantine) -> None:
    for name in ("a", "ab"):
        quarantine.note_crash(crash_of([make(name, adapter)], is_alone=True))


def test_a_request_in_quarantine_is_not_sent_to_the_next_process(
    requests: OpenRequests, supervisor: FakeSupervisor, quarantine: Quarantine
) -> None:
    async def scenario() -> None:
        events: list[RequestEvent] = []
        requests.submit(make("waits", BAD), events.append)
        requests.submit(make("other", GOOD), None)
        crash_twice_under(BAD, quarantine)
        requests.settle()
        supervisor.sent.clear()
        requests.resubmit()
        assert supervisor.submitted() == ["other"]
        (end,) = events
        assert isinstance(end, RequestFinished)
        assert end.error is not None
        assert end.error.code == "adapter_quarantined"

    asyncio.run(scenario())


def test_a_request_that_is_sent_again_keeps_its_deadline(
    requests: OpenRequests, supervisor: FakeSupervisor
) -> None:
    async def scenario() -> None:
        requests.submit(make("waits", deadline=10.0), None)
        await asyncio.sleep(0.01)
        requests.settle()
        requests.resubmit()
        first, second = (sent.request for sent in supervisor.sent if isinstance(sent, Submit))
        assert first.deadline_seconds == 10.0
        assert second.deadline_seconds is not None
        assert 9.0 < second.deadline_seconds < 9.995

    asyncio.run(scenario())


def test_the_output_of_a_request_that_is_sent_again_is_not_remembered(
    requests: OpenRequests, supervisor: FakeSupervisor
) -> None:
    """The process that was told to forget it is gone."""

    async def scenario() -> None:
        requests.submit(replace(make("waits", GOOD), remembers_output=True), None)
        requests.settle()
        requests.resubmit()
        sent = (message for message in supervisor.sent if isinstance(message, Submit))
        assert [each.request.remembers_output for each in sent] == [True, False]

    asyncio.run(scenario())


def test_the_engine_is_told_of_a_request_whose_deadline_ended_it_here(
    requests: OpenRequests, supervisor: FakeSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_streams, "DEADLINE_SLACK_SECONDS", 0.0)

    async def scenario() -> None:
        requests.submit(make("late", deadline=0.0), None)
        while len(requests):
            await asyncio.sleep(0)
        assert supervisor.sent[1:] == [Abort("late")]

    asyncio.run(scenario())


def test_who_shared_its_step_with_a_request_that_has_ended_was_not_alone(
    requests: OpenRequests, quarantine: Quarantine
) -> None:
    async def scenario() -> None:
        requests.submit(make("shared", GOOD), None)
        for _ in range(2):
            requests.note_crash({"shared", "ended"})
        assert not quarantine.holds(GOOD)
        requests.note_crash({"shared"})
        assert quarantine.holds(GOOD)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("adapters", "is_alone"),
    [
        ([GOOD], True),
        ([GOOD, GOOD], True),
        ([GOOD, BAD], False),
        ([None], True),
        ([None, None], False),
        ([None, GOOD], False),
    ],
)
def test_an_adapter_is_alone_in_a_pass_of_its_own_requests_and_a_base_request_without_others(
    requests: OpenRequests, adapters: list[AdapterKey | None], is_alone: bool
) -> None:
    async def scenario() -> None:
        names = {f"r{number}": adapter for number, adapter in enumerate(adapters)}
        for name, adapter in names.items():
            requests.submit(make(name, adapter), None)
        assert requests.note_crash(names.keys()).is_alone is is_alone
        assert not requests.note_crash({*names, "gone"}).is_alone, "nobody knows what that ran"

    asyncio.run(scenario())


def test_an_end_that_the_engine_tells_clears_the_request(
    requests: OpenRequests, quarantine: Quarantine
) -> None:
    async def scenario() -> None:
        request = make("suspect")
        requests.submit(request, None)
        requests.note_crash({"suspect"})
        end = RequestFinished("suspect", FinishReason.STOP, 1, 1)
        requests.deliver(StepEvents(finished=[end]))
        assert not quarantine.num_lone_steps(request)

    asyncio.run(scenario())


def test_a_stream_counts_nothing_once_it_is_closed_because_its_slot_may_be_another_s(
    requests: OpenRequests, tmp_path: Path
) -> None:
    journal = TokenJournal(tmp_path / "journal", num_slots=1)
    slots = journal.open(b"first", [True])
    stream = requests.submit(make("first"), None, journal.counter(slots[0]))
    requests.deliver(StepEvents(started=[RequestStarted("first", 0.0, 0.0, None, 0)]))
    requests.deliver(StepEvents(tokens=[TokensGenerated("first", [1])]))
    stream.close()
    assert journal.counts(slots) == Counts(prompt=1, generated=1)
    journal.free(slots)
    assert journal.open(b"second", [True]) == slots
    end = RequestFinished("first", FinishReason.ABORTED, 1, 3)
    requests.deliver(StepEvents(tokens=[TokensGenerated("first", [2, 3])], finished=[end]))
    assert journal.counts(slots) == Counts()
    assert len(requests) == 0


# --- adapters -------------------------------------------------------------------------------------


def resident(*keys: AdapterKey) -> Any:
    return SimpleNamespace(adapters=[SimpleNamespace(key=key, tier=Tier.DEVICE) for key in keys])


def test_a_new_process_loads_no_adapter_in_quarantine(
    kept: KeptAdapters, supervisor: FakeSupervisor, quarantine: Quarantine
) -> None:
    kept.set_pinned([BAD, GOOD])
    kept.note_residents(resident(BAD, GOOD))
    crash_twice_under(BAD, quarantine)
    supervisor.sent.clear()
    kept.bring_back()
    assert supervisor.sent == [SetPinned([GOOD]), Prefetch(GOOD)]


def test_what_a_process_holds_replaces_what_the_one_before_it_held_once_it_is_warm(
    kept: KeptAdapters, supervisor: FakeSupervisor
) -> None:
    def brought_back() -> list[ToEngine]:
        supervisor.sent.clear()
        kept.bring_back()
        return supervisor.sent

    kept.note_residents(resident(BAD))
    supervisor.ready_seconds = WARM_UP_SECONDS - 1
    kept.note_residents(resident(GOOD))
    assert brought_back() == [Prefetch(GOOD), Prefetch(BAD)]
    supervisor.ready_seconds = WARM_UP_SECONDS
    kept.note_residents(resident(GOOD))
    assert brought_back() == [Prefetch(GOOD)]


def test_the_order_in_which_a_new_process_loads_adapters_is_not_taken_for_their_use(
    kept: KeptAdapters, supervisor: FakeSupervisor
) -> None:
    other = AdapterKey("acme", "other")
    supervisor.ready_seconds = WARM_UP_SECONDS
    kept.note_residents(resident(GOOD, BAD))
    supervisor.ready_seconds = WARM_UP_SECONDS - 1
    kept.note_residents(resident(BAD, GOOD))
    kept.note_residents(resident(other, BAD, GOOD))
    kept.bring_back()
    assert supervisor.sent == [Prefetch(other), Prefetch(GOOD), Prefetch(BAD)]


def test_pins_that_were_set_while_no_process_ran_reach_the_next_one(
    kept: KeptAdapters, supervisor: FakeSupervisor
) -> None:
    supervisor.is_ready = False
    kept.set_pinned([GOOD, BAD])
    assert not supervisor.sent
    kept.unpin(BAD)
    kept.bring_back()
    assert supervisor.sent == [SetPinned([GOOD])]
