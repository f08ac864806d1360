"""The order of waiting requests, compared with a plain sort, and the handling of candidates."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loraplex.engine.scheduling import fairness
from loraplex.engine.scheduling.candidates import Candidates
from loraplex.engine.scheduling.fairness import VirtualTokenCounters
from loraplex.engine.scheduling.waiting import WaitingQueue

AGEING = 10.0


@dataclass(eq=False, slots=True)
class Entry:
    request_id: str
    tenant_id: str = "a"
    adapter: str | None = None
    priority: int = 0
    due_time: float = 0.0
    is_late: bool = False
    tenant_weight: float = 1.0


@dataclass(eq=False, slots=True)
class Stay:
    """The model's memory of an entry's stay."""

    entry: Entry
    number: int
    is_preempted: bool


@dataclass(eq=False, slots=True)
class Past:
    """The model's memory of a tenant: its queues' service and when each was served last."""

    turn: int
    service: VirtualTokenCounters[str | None]
    queue_turns: dict[str | None, int]


class SortedQueue:
    """The queue as the documentation tells it: everything sorted again for every candidate."""

    def __init__(self) -> None:
        self.counters: VirtualTokenCounters[str] = VirtualTokenCounters()
        self.stays: dict[str, Stay] = {}
        self.pasts: dict[str, Past] = {}
        self.now = 0
        self.excluded: set[str] = set()
        self.parked: set[tuple[str, str | None]] = set()
        self.stopped: set[str] = set()
        self.visited: set[str] = set()
        self.absent: set[str | None] = set()
        """Lines that may not run in this walk."""

    def turn(self) -> int:
        self.now += 1
        return self.now

    def add(self, entry: Entry, *, is_preempted: bool) -> None:
        number = self.turn()
        self.stays[entry.request_id] = Stay(entry, number, is_preempted)
        self.excluded.add(entry.request_id)
        past = self.pasts.setdefault(entry.tenant_id, Past(number, VirtualTokenCounters(), {}))
        past.queue_turns.setdefault(entry.adapter, number)
        self.activate(entry)

    def activate(self, entry: Entry) -> None:
        self.counters.activate(entry.tenant_id, entry.tenant_weight)
        self.pasts[entry.tenant_id].service.activate(entry.adapter)

    def remove(self, entry: Entry) -> None:
        del self.stays[entry.request_id]
        left = [stay.entry for stay in self.stays.values() if same_tenant(stay.entry, entry)]
        past = self.pasts[entry.tenant_id]
        if entry.adapter not in {other.adapter for other in left}:
            del past.queue_turns[entry.adapter]
            past.service.deactivate(entry.adapter)
        if not left:
            del self.pasts[entry.tenant_id]
            self.counters.deactivate(entry.tenant_id)

    def begin_walk(self, absent: set[str | None]) -> None:
        self.turn()
        self.excluded, self.parked, self.stopped = set(), set(), set()
        self.visited, self.absent = set(), absent

    def next(self) -> Entry | None:
        while (first := self._first()) and first.tenant_id not in self.visited:
            self.visited.add(first.tenant_id)
            offered = [stay.entry for stay in self._offered() if same_tenant(stay.entry, first)]
            heads = {entry.adapter: entry for entry in offered if entry.adapter in self.absent}
            for queue in self.pasts[first.tenant_id].queue_turns:
                if queue in heads:
                    self.park(heads[queue])
            self.note_held_up(first.tenant_id)
        return first

    def _offered(self) -> list[Stay]:
        return [
            stay
            for stay in self.stays.values()
            if stay.entry.request_id not in self.excluded
            and (stay.entry.tenant_id, stay.entry.adapter) not in self.parked
            and stay.entry.tenant_id not in self.stopped
        ]

    def _first(self) -> Entry | None:
        offered = self._offered()
        preempted = {(s.entry.tenant_id, s.entry.adapter) for s in offered if s.is_preempted}

        def key(stay: Stay) -> tuple[float, ...]:
            entry = stay.entry
            past = self.pasts[entry.tenant_id]
            return (
                self.counters.counter(entry.tenant_id),
                past.turn,
                (entry.tenant_id, entry.adapter) not in preempted,
                past.service.counter(entry.adapter),
                past.queue_turns[entry.adapter],
                not stay.is_preempted,
                entry.due_time + AGEING * (entry.priority + entry.is_late),
                stay.number,
            )

        return min(offered, key=key).entry if offered else None

    def admit(self, entry: Entry, service: int) -> None:
        self.activate(entry)
        past = self.pasts[entry.tenant_id]
        past.turn = past.queue_turns[entry.adapter] = self.turn()
        self.remove(entry)
        self.charge(entry, service)

    def charge(self, entry: Entry, service: int) -> None:
        self.counters.charge(entry.tenant_id, service)
        if entry.tenant_id in self.pasts:
            self.pasts[entry.tenant_id].service.charge(entry.adapter, service)

    def park(self, entry: Entry) -> None:
        self.parked.add((entry.tenant_id, entry.adapter))
        past = self.pasts[entry.tenant_id]
        past.service.deactivate(entry.adapter)

    def note_held_up(self, tenant: str) -> None:
        queues = self.pasts[tenant].queue_turns if tenant in self.pasts else {}
        if queues and all((tenant, queue) in self.parked for queue in queues):
            self.counters.deactivate(tenant)


def same_tenant(one: Entry, other: Entry) -> bool:
    return one.tenant_id == other.tenant_id


ANSWERS = st.sampled_from(["admit", "admit", "park", "skip", "stop", "remove", "preempt", "leave"])
ENTRIES = st.builds(
    Entry,
    request_id=st.just(""),
    tenant_id=st.sampled_from("abc"),
    adapter=st.sampled_from([None, "x", "y"]),
    priority=st.integers(-1, 2),
    due_time=st.integers(0, 30).map(float),
)
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0}


class QueueAgainstSort(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.counters: VirtualTokenCounters[str] = VirtualTokenCounters()
        self.queue: WaitingQueue[Entry] = WaitingQueue(self.counters, lambda: 0.0, AGEING)
        self.model = SortedQueue()
        self.running: list[Entry] = []
        self.num_added = 0

    @rule(entries=st.lists(ENTRIES, min_size=1, max_size=6))
    def add(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.num_added += 1
            entry.request_id = str(self.num_added)
            entry.tenant_weight = WEIGHTS[entry.tenant_id]
            self.queue.add(entry)
            self.model.add(entry, is_preempted=False)

    @rule()
    def preempt(self) -> None:
        if self.running:
            entry = self.running.pop()
            self.queue.add_front(entry)
            self.model.add(entry, is_preempted=True)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.model.stays:
            self.remove(self.model.stays[data.draw(st.sampled_from([*self.model.stays]))].entry)

    @rule(data=st.data())
    def defer(self, data: st.DataObject) -> None:
        timely = [s for s in self.model.stays.values() if not (s.is_preempted or s.entry.is_late)]
        if timely:
            stay = data.draw(st.sampled_from(timely))
            stay.entry.is_late = True
            stay.number = self.model.turn()
            self.queue.defer(stay.entry)

    @rule(service=st.integers(1, 9))
    def decode(self, service: int) -> None:
        self.queue.charge_outputs(self.running, [service] * len(self.running))
        for entry in self.running:
            self.model.charge(entry, 2 * service)  # as an output counts

    @rule(
        data=st.data(),
        service=st.integers(0, 9),
        absent=st.sets(st.sampled_from([None, "x", "y"])),
    )
    def walk(self, data: st.DataObject, service: int, absent: set[str | None]) -> None:
        self.model.begin_walk(absent)
        for entry in (walk := self.queue.candidates(lambda entry: entry.adapter not in absent)):
            assert entry is self.model.next()
            answer = data.draw(ANSWERS)
            if answer == "leave":
                return
            self.answer(walk, entry, answer, service)
            if answer != "stop":
                self.model.note_held_up(entry.tenant_id)
        assert self.model.next() is None

    def answer(self, walk: Candidates[Entry], entry: Entry, answer: str, service: int) -> None:
        if answer == "park":
            walk.park_queue()
            self.model.park(entry)
        elif answer == "skip":
            walk.skip()
            self.model.excluded.add(entry.request_id)
        elif answer == "stop":
            walk.stop_tenant()
            self.model.stopped.add(entry.tenant_id)
        elif answer == "remove":
            self.remove(entry)
        else:
            self.queue.admit(entry)
            self.queue.charge(entry, self.counters.charge(entry.tenant_id, service))
            self.model.admit(entry, service)
            self.running.append(entry)
            if answer == "preempt":
                self.preempt()

    def remove(self, entry: Entry) -> None:
        assert self.queue.remove(entry)
        assert not self.queue.remove(entry)
        self.model.remove(entry)

    @invariant()
    def holds_the_same(self) -> None:
        waiting = [stay.entry for stay in self.model.stays.values()]
        assert len(self.queue) == len(waiting)
        assert all(entry in self.queue for entry in waiting)
        assert not any(entry in self.queue for entry in self.running)
        assert self.queue.tenants.keys() == {entry.tenant_id for entry in waiting}
        for tenant in "abc":
            assert self.queue.num_of(tenant) == sum(e.tenant_id == tenant for e in waiting)
            assert self.counters.counter(tenant) == self.model.counters.counter(tenant)
            assert self.counters.is_active(tenant) == self.model.counters.is_active(tenant)


TestQueueAgainstSort = pytest.mark.slow(QueueAgainstSort.TestCase)
TestQueueAgainstSort.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, derandomize=True
)


def make_queue(*entries: Entry) -> WaitingQueue[Entry]:
    queue: WaitingQueue[Entry] = WaitingQueue(VirtualTokenCounters(), lambda: 0.0, AGEING)
    for entry in entries:
        queue.add(entry)
    return queue


def drain(queue: WaitingQueue[Entry]) -> list[str]:
    order = []
    for entry in queue.candidates():
        order.append(entry.request_id)
        queue.admit(entry)
    return order


def test_parked_lines_hide_neither_their_tenants_other_lines_nor_other_tenants() -> None:
    queue = make_queue(
        *(Entry(f"cold-{number}", adapter="cold") for number in range(3)),
        Entry("warm", adapter="warm"),
        Entry("base"),
        Entry("other", tenant_id="b", adapter="cold"),
    )
    admitted = []
    for entry in (walk := queue.candidates()):
        if (entry.tenant_id, entry.adapter) == ("a", "cold"):
            walk.park_queue()
            continue
        queue.admit(entry)
        admitted.append(entry.request_id)
    assert sorted(admitted) == ["base", "other", "warm"]
    assert drain(queue) == ["cold-0", "cold-1", "cold-2"]


def test_lower_priorities_come_first_and_equal_ones_in_order_of_arrival() -> None:
    queue = make_queue(
        Entry("late", priority=1, due_time=2.0),
        Entry("early", priority=1, due_time=1.0),
        Entry("urgent", priority=0, due_time=3.0),
    )
    assert drain(queue) == ["urgent", "early", "late"]


@pytest.mark.parametrize("priority", [1, 2, 5])
def test_a_flood_of_better_priority_passes_a_request_for_its_ageing_only(priority: int) -> None:
    queue = make_queue(Entry("patient", priority=priority, due_time=0.5))
    admitted: list[str] = []
    # A request of priority 0 comes every second and one is served: the queue never shrinks.
    for second in range(100):
        queue.add(Entry(str(second), due_time=float(second)))
        for entry in queue.candidates():
            queue.admit(entry)
            admitted.append(entry.request_id)
            break
    assert admitted.index("patient") == priority * AGEING + 1


def test_a_late_request_is_passed_by_those_of_its_queue_for_the_ageing_of_one_level() -> None:
    late = Entry("late", due_time=0.5)
    queue = make_queue(late, Entry("other queue", adapter="x", priority=9), Entry("early"))
    late.is_late = True
    queue.defer(late)
    queue.add(Entry("within", due_time=AGEING))
    queue.add(Entry("beyond", due_time=AGEING + 1))
    assert len(queue) == 5
    order = drain(queue)
    order.remove("other queue")
    assert order == ["early", "within", "late", "beyond"]


def test_deferring_a_tenants_only_request_keeps_its_place_among_tenants() -> None:
    first, second = Entry("first"), Entry("second", tenant_id="b")
    queue = make_queue(first, second)
    queue.counters.charge("b", input_tokens=5)
    owed = queue.counters.counter("a")
    first.is_late = True
    queue.defer(first)
    assert (queue.num_of("a"), queue.counters.counter("a")) == (1, owed)
    assert drain(queue) == ["first", "second"]


def test_a_preempted_request_comes_before_its_tenants_others_but_not_before_other_tenants() -> None:
    queue = make_queue(Entry("new", adapter="x"), Entry("b", tenant_id="b"))
    queue.counters.charge("a", input_tokens=5)
    queue.add_front(Entry("preempted", adapter="y", priority=9, due_time=99.0))
    assert drain(queue) == ["b", "preempted", "new"]


def test_lines_of_a_tenant_share_by_tokens_not_by_requests() -> None:
    queue = make_queue(
        *(Entry(f"x{number}", adapter="x") for number in range(4)),
        *(Entry(f"y{number}", adapter="y") for number in range(4)),
    )
    order = []
    for entry in queue.candidates():
        queue.admit(entry)
        service = queue.counters.charge(entry.tenant_id, 30 if entry.adapter == "x" else 10)
        queue.charge(entry, service)
        order.append(entry.request_id)
    assert order[:5] == ["x0", "y0", "y1", "y2", "x1"]


def test_adapters_that_are_never_charged_take_turns() -> None:
    queue = make_queue(
        *(Entry(f"{adapter}{n}", adapter=adapter) for adapter in "xy" for n in range(3))
    )
    assert drain(queue) == ["x0", "y0", "x1", "y1", "x2", "y2"]


def test_what_does_not_wait_cannot_be_removed() -> None:
    entry = Entry("only")
    queue = make_queue(entry)
    assert (queue.remove(entry), queue.remove(entry)) == (True, False)
    assert (len(queue), queue.num_of("a"), queue.waited_seconds("a")) == (0, 0, 0.0)


def test_a_tenant_held_up_by_its_adapter_earns_no_credit_and_lets_no_one_earn_any() -> None:
    queue = make_queue(Entry("cold", adapter="cold"), Entry("busy", tenant_id="b"))
    for entry in (walk := queue.candidates()):
        if entry.adapter == "cold":
            walk.park_queue()
        else:
            walk.skip()
    queue.counters.charge("b", output_tokens=500)
    queue.add(Entry("back", tenant_id="c"))
    assert queue.counters.counter("c") == 1000.0
    for entry in queue.candidates():
        assert entry.request_id == "cold"
        queue.admit(entry)
        break
    assert queue.counters.counter("a") == 1000.0


def test_a_candidate_left_without_an_answer_is_an_error() -> None:
    walk = make_queue(Entry("1"), Entry("2")).candidates()
    next(walk)
    with pytest.raises(AssertionError, match="answered"):
        next(walk)


def test_waited_seconds_start_anew_with_each_admission() -> None:
    now = [5.0]
    queue: WaitingQueue[Entry] = WaitingQueue(VirtualTokenCounters(), lambda: now[0], AGEING)
    queue.add(Entry("1"))
    queue.add(Entry("2"))
    now[0] = 7.0
    assert queue.waited_seconds("a") == 2.0
    queue.admit(next(queue.candidates()))
    assert queue.waited_seconds("a") == 0.0
    assert queue.waited_seconds("nobody") == 0.0


def test_those_who_left_do_not_pile_up_behind_one_who_stays() -> None:
    queue = make_queue(Entry("first", due_time=-1.0))
    for number in range(5_000):
        entry = Entry(str(number), due_time=float(number))
        queue.add(entry)
        queue.remove(entry)
    assert len(queue.tenants["a"].queues[None]._heap) < 50


class CountedReads(VirtualTokenCounters[str]):
    num_reads = 0

    def counter(self, party: str) -> float:
        self.num_reads += 1
        return super().counter(party)


@pytest.mark.parametrize("num_tenants", [10, 1000])
def test_a_walk_looks_only_at_the_tenants_it_visits(num_tenants: int) -> None:
    counters = CountedReads()
    queue: WaitingQueue[Entry] = WaitingQueue(counters, lambda: 0.0, AGEING)
    for number in range(2 * num_tenants):
        queue.add(Entry(str(number), tenant_id=str(number % num_tenants)))
    counters.num_reads = 0
    for num_admitted, entry in enumerate(queue.candidates(), start=1):
        queue.admit(entry)
        if num_admitted == 5:
            break
    assert 0 < counters.num_reads < 40


def test_the_next_adapters_are_the_least_served_of_the_least_served_tenants_in_turn() -> None:
    queue: WaitingQueue[Entry] = WaitingQueue(VirtualTokenCounters(), lambda: 0.0, AGEING)
    waiting = [("served", "s1"), ("new", "n1"), ("new", None), ("new", "n2"), ("served", "s2")]
    for number, (tenant_id, adapter) in enumerate(waiting):
        queue.add(Entry(f"r{number}", tenant_id, adapter))
    queue.charge(Entry("r0", "served", "s1"), queue.counters.charge("served", input_tokens=10))
    assert queue.next_adapters(10) == ["n1", "s2", "s1", "n2"]
    assert queue.next_adapters(1) == ["n1"]
    queue.add_front(Entry("r5", "new", "n3"))
    assert queue.next_adapters(3) == ["n3", "s2", "n1"]


def test_outputs_are_charged_to_the_queues_of_tenants_that_wait_at_that_time() -> None:
    queue, running = make_queue(), [Entry("running", "a", "x")]
    services = []
    for waiting in (None, Entry("1", "a", "y"), None, Entry("2", "a", "y")):
        if waiting:
            queue.add(waiting)
        queue.charge_outputs(running, [1])
        if waiting:
            queue.charge_outputs(running, [1])
            services.append(queue.tenants["a"].service.counter("x"))
            queue.remove(waiting)
    assert services == [4.0, 4.0]
    assert queue.counters.counter("a") == 12.0


def test_outputs_after_a_counter_was_forgotten_are_charged_to_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fairness, "MAX_IDLE_PARTIES", 0)
    counters: VirtualTokenCounters[str] = VirtualTokenCounters()
    queue: WaitingQueue[Entry] = WaitingQueue(counters, lambda: 0.0)
    running = [Entry("running", "idle")]
    counters.charge("served", output_tokens=50)
    for tenant_id in ("served", "other"):
        queue.add(Entry(tenant_id, tenant_id))
    queue.charge_outputs(running, [3])
    counters.deactivate("other")
    assert counters.counter("idle") == 0.0
    queue.charge_outputs(running, [1])
    assert counters.counter("idle") == 2.0
