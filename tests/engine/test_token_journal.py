"""After any crash the journal has what was received before it."""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

from loraplex.engine.config import EngineConfig
from loraplex.engine.messages import (
    GenerationRequest,
    Pooling,
    RequestStarted,
    SpeculationParams,
    StepEvents,
    TokensGenerated,
)
from loraplex.engine.process.client import EngineClient
from loraplex.engine.process.open_requests import OpenRequests
from loraplex.engine.process.quarantine import Quarantine
from loraplex.engine.process.request_stream import RequestEvent, RequestStream
from loraplex.engine.process.supervisor import RestartPolicy
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.token_journal import (
    MAX_OUTCOME_BYTES,
    MAX_OWNER_BYTES,
    SLOT_BYTES,
    Counts,
    JournalFull,
    TokenJournal,
)
from support.engine import LocalEngine
from support.fake_client import (
    FAKE_ENGINE,
    collect,
    error_of,
    fetch_at_once,
    kill,
    make_request,
    tokens_of,
    until,
)
from support.fake_engine import HANG, QUEUE

NUM_SLOTS = 6


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def count(journal: TokenJournal, slot: int, *, prompt: int, cached: int, generated: int) -> None:
    counter = journal.counter(slot)
    counter.start(num_prompt_tokens=prompt, num_cached_tokens=cached)
    counter.generate(generated)


def test_an_earlier_life_leaves_its_requests_and_their_counts(path: Path) -> None:
    journal = TokenJournal(path, num_slots=NUM_SLOTS)
    running = journal.open(b"running", [True, False])
    decided = journal.open(b"decided", [True])
    journal.free(journal.open(b"over", [True]))
    for slot in running:
        count(journal, slot, prompt=7, cached=2, generated=5)
    journal.close_request(decided, b"outcome")
    journal.close()

    journal = TokenJournal(path, num_slots=NUM_SLOTS)
    left = {entry.owner: entry for entry in journal.take_left()}
    assert left.keys() == {b"running", b"decided"}
    assert left[b"running"].outcome is None
    assert left[b"decided"].outcome == b"outcome"
    assert left[b"running"].slots == running
    assert journal.counts(running) == Counts(prompt=7, cached=2, generated=10)
    assert journal.num_free == NUM_SLOTS - 3
    assert journal.take_left() == []
    journal.free(running)
    assert journal.num_free == NUM_SLOTS - 1


def test_a_request_that_does_not_fit_takes_nothing(path: Path) -> None:
    journal = TokenJournal(path, num_slots=2)
    journal.open(b"a", [True])
    with pytest.raises(JournalFull):
        journal.open(b"b", [True, False])
    assert journal.num_free == 1
    journal.open(b"c", [True])
    with pytest.raises(ValueError, match="too long"):
        journal.open(bytes(MAX_OWNER_BYTES + 1), [True])


def test_only_its_owner_may_read_it_and_nothing_stays_open(path: Path) -> None:
    journal = TokenJournal(path, num_slots=1)
    assert path.stat().st_mode & 0o777 == 0o600
    journal.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(journal._descriptor)


def test_a_slot_begins_anew_with_each_request(path: Path) -> None:
    journal = TokenJournal(path, num_slots=1)
    slots = journal.open(b"first", [True])
    count(journal, slots[0], prompt=7, cached=2, generated=5)
    journal.free(slots)
    assert journal.open(b"second", [True]) == slots
    assert journal.counts(slots) == Counts(0, 0, 0)


def test_each_sequence_that_accounts_for_its_prompt_is_counted_once_it_has_begun(
    path: Path,
) -> None:
    journal = TokenJournal(path, num_slots=4)
    slots = journal.open(b"owner", [True, True, False, True])
    for slot, prompt, cached in zip(slots, (7, 5, 9, 0), (2, 1, 3, 4), strict=True):
        count(journal, slot, prompt=prompt, cached=cached, generated=10)
    assert journal.counts(slots) == Counts(prompt=12, cached=3, generated=40)


def test_the_head_is_the_first_slot_wherever_it_lies(path: Path) -> None:
    journal = TokenJournal(path, num_slots=3)
    for slots in sorted((journal.open(bytes([n]), [True]) for n in range(3)), reverse=True):
        journal.free(slots)
    slots = journal.open(b"owner", [True, False])
    assert slots == (2, 1)
    journal.close_request(slots, b"outcome")
    journal.close()
    (entry,) = TokenJournal(path, num_slots=3).take_left()
    assert (entry.slots, entry.outcome) == ((2, 1), b"outcome")


def test_slots_without_a_head_belong_to_nobody(path: Path) -> None:
    journal = TokenJournal(path, num_slots=2)
    head, _ = journal.open(b"owner", [True, True])
    journal.free([head])  # it dies here
    journal.close()
    journal = TokenJournal(path, num_slots=2)
    assert journal.take_left() == []
    assert journal.num_free == 2
    slots = journal.open(b"owner", [True])
    journal.close()
    (entry,) = TokenJournal(path, num_slots=2).take_left()
    assert entry.slots == slots


def test_an_outcome_that_does_not_fit_is_refused(path: Path) -> None:
    journal = TokenJournal(path, num_slots=1)
    slots = journal.open(b"owner", [True])
    with pytest.raises(ValueError, match="too long"):
        journal.close_request(slots, bytes(MAX_OUTCOME_BYTES + 1))


def test_an_outcome_is_decided_once(path: Path) -> None:
    journal = TokenJournal(path, num_slots=1)
    slots = journal.open(b"owner", [True])
    journal.close_request(slots, b"outcome")
    with pytest.raises(AssertionError, match="not decided yet"):
        journal.close_request(slots, b"other")
    journal.close()
    (entry,) = TokenJournal(path, num_slots=1).take_left()
    assert entry.outcome == b"outcome"


def test_whole_pages_up_to_the_end_of_the_head_go_to_the_disk(path: Path) -> None:
    num_slots = 2 * mmap.PAGESIZE // SLOT_BYTES
    journal = TokenJournal(path, num_slots=num_slots)
    flushed: list[tuple[int, int]] = []
    mapped = SimpleNamespace(flush=lambda start, size: flushed.append((start, size)))
    with patch.object(journal, "_map", mapped):
        journal.sync([1, num_slots - 1])
        journal.sync([num_slots - 1, 1])
    assert flushed == [(0, 2 * SLOT_BYTES), (mmap.PAGESIZE, mmap.PAGESIZE)]


def test_the_longest_owner_and_outcome_touch_no_other_slot(path: Path) -> None:
    journal = TokenJournal(path, num_slots=3)
    slots = [journal.open(bytes([n]) * MAX_OWNER_BYTES, [True]) for n in range(3)]
    journal.close_request(slots[1], b"\xff" * MAX_OUTCOME_BYTES)
    journal.sync(slots[1])
    journal.close()
    first, second, third = TokenJournal(path, num_slots=3).take_left()
    assert [entry.owner[:1] for entry in (first, second, third)] == [b"\0", b"\1", b"\2"]
    assert (first.outcome, third.outcome) == (None, None)
    assert second.outcome == b"\xff" * MAX_OUTCOME_BYTES


def test_a_file_with_more_slots_keeps_them(path: Path) -> None:
    TokenJournal(path, num_slots=8).close()
    assert TokenJournal(path, num_slots=4).num_slots == 8
    assert path.stat().st_size == 8 * SLOT_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is mapped")
def test_opening_maps_all_pages_so_that_counting_causes_no_page_faults(path: Path) -> None:
    reading = (
        "import sys; from pathlib import Path; "
        "from loraplex.engine.token_journal import TokenJournal; "
        "journal = TokenJournal(Path(sys.argv[1]), num_slots=1024); "
        "print(Path('/proc/self/smaps').read_text().partition(sys.argv[1])[2])"
    )
    mapping = subprocess.check_output(python(reading, path), text=True, env=environment())
    resident = re.search(r"Rss: +(\d+) kB", mapping)
    assert resident is not None
    assert int(resident[1]) * 1024 == 1024 * SLOT_BYTES


RECEIVING = """
import sys
from pathlib import Path
from loraplex.engine.messages import GenerationRequest, RequestStarted, TokensGenerated
from loraplex.engine.process.request_stream import RequestStream
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.token_journal import TokenJournal

journal = TokenJournal(Path(sys.argv[1]), num_slots=1)
(slot,) = journal.open(b"owner", [True])
num_received = 0

def take(event):
    global num_received
    if isinstance(event, TokensGenerated):
        num_received += len(event.token_ids)
        print(num_received, flush=True)

request = GenerationRequest("r", "acme", [1] * 7, SamplingParams())
stream = RequestStream(
    request, abort=lambda stream: None, take=take, counter=journal.counter(slot)
)
stream.feed(RequestStarted("r", 0.0, 0.0, None, 2))
while True:
    stream.feed(TokensGenerated("r", [1, 2, 3]))
"""
"""A process that receives steps of three tokens and tells how many tokens its consumer has."""


@pytest.mark.parametrize("num_lines", [1, 40, 333])
def test_no_consumer_has_a_token_that_its_killed_process_has_not_counted(
    path: Path, num_lines: int
) -> None:
    with subprocess.Popen(
        python(RECEIVING, path), stdout=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        for _ in range(num_lines):
            process.stdout.readline()
        process.kill()
        lines = process.stdout.read().splitlines(keepends=True)
    whole = [int(line) for line in lines if line.endswith(b"\n")]
    num_received = whole[-1] if whole else 3 * num_lines
    journal = TokenJournal(path, num_slots=1)
    (entry,) = journal.take_left()
    counts = journal.counts(entry.slots)
    assert (counts.prompt, counts.cached) == (7, 2)
    assert counts.generated in (num_received, num_received + 3)


GENERATED = slice(40, 48)
"""A slot's bytes that hold the number of output tokens."""
COUNTING = """
import sys
from itertools import count
from pathlib import Path
from loraplex.engine.token_journal import TokenJournal

journal = TokenJournal(Path(sys.argv[1]), num_slots=1)
counter = journal.counter(journal.open(b"owner", [True])[0])
counter.generate(1)
print("counting", flush=True)
for num_tokens in count(2):
    counter.generate(num_tokens)
"""


def test_at_no_instant_does_a_slot_have_another_count_than_the_old_or_the_new(path: Path) -> None:
    with subprocess.Popen(
        python(COUNTING, path), stdout=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), SLOT_BYTES, prot=mmap.PROT_READ)
        seen = [mapped[GENERATED] for _ in range(200_000)]
        process.kill()
    counts = [int.from_bytes(each, sys.byteorder) for each in seen]
    assert counts[0] > 0
    assert counts == sorted(counts)


def python(code: str, path: Path) -> list[str]:
    return [sys.executable, "-c", code, str(path)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class JournalMachine(RuleBasedStateMachine):
    """Against a dictionary, over deaths of the process."""

    requests: Bundle[bytes] = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="loraplex-journal-"))
        self.path = self.directory / "journal"
        self.model: dict[bytes, tuple[tuple[int, ...], list[list[int]], bytes | None]] = {}
        self.number = 0
        self.journal = TokenJournal(self.path, num_slots=NUM_SLOTS)

    @rule(target=requests, counts_prompt=st.lists(st.booleans(), min_size=1, max_size=3))
    def open(self, counts_prompt: Sequence[bool]) -> bytes:
        self.number += 1
        owner = b"%d" % self.number
        num_used = sum(len(slots) for slots, _, _ in self.model.values())
        try:
            slots = self.journal.open(owner, counts_prompt)
        except JournalFull:
            assert num_used + len(counts_prompt) > NUM_SLOTS
            return owner
        self.model[owner] = (
            slots,
            [[int(is_counted), 0, 0, 0] for is_counted in counts_prompt],
            None,
        )
        return owner

    @rule(
        owner=requests, index=st.integers(0, 2), start=st.integers(1, 9), tokens=st.integers(0, 9)
    )
    def receive(self, owner: bytes, index: int, start: int, tokens: int) -> None:
        if owner in self.model:
            slots, counts, _ = self.model[owner]
            index %= len(slots)
            count(self.journal, slots[index], prompt=start, cached=start // 2, generated=tokens)
            counts[index][1:] = [start, start // 2, tokens]

    @rule(owner=requests, outcome=st.binary(min_size=1, max_size=MAX_OUTCOME_BYTES))
    def close_request(self, owner: bytes, outcome: bytes) -> None:
        if owner in self.model and self.model[owner][2] is None:
            slots, counts, _ = self.model[owner]
            self.journal.close_request(slots, outcome)
            self.model[owner] = (slots, counts, outcome)

    @rule(owner=consumes(requests))
    def free(self, owner: bytes) -> None:
        if owner in self.model:
            self.journal.free(self.model.pop(owner)[0])

    @rule()
    def process_dies(self) -> None:
        self.journal.close()
        self.journal = TokenJournal(self.path, num_slots=NUM_SLOTS)
        left = {entry.owner: entry for entry in self.journal.take_left()}
        assert left.keys() == self.model.keys()
        for owner, (slots, counts, outcome) in self.model.items():
            assert (left[owner].slots, left[owner].outcome) == (slots, outcome)
            paid = [count for count in counts if count[0]]
            assert self.journal.counts(slots) == Counts(
                sum(count[1] for count in paid),
                sum(count[2] for count in paid),
                sum(count[3] for count in counts),
            )

    def teardown(self) -> None:
        self.process_dies()
        self.journal.close()
        self.path.unlink()
        self.directory.rmdir()


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class Consumer:
    """Adds up what it receives of one request, and compares it with the journal each time."""

    def __init__(self, journal: TokenJournal, slot: int, num_prompt_tokens: int) -> None:
        self.received = Counts()
        self._journal = journal
        self._slot = slot
        self._num_prompt_tokens = num_prompt_tokens

    def take(self, event: RequestEvent) -> None:
        if isinstance(event, RequestStarted):
            self.received = Counts(self._num_prompt_tokens, event.num_cached_tokens)
        elif isinstance(event, TokensGenerated):
            num_tokens = self.received.generated + len(event.token_ids)
            self.received = self.received._replace(generated=num_tokens)
        self.check()

    def check(self) -> None:
        assert self._journal.counts([self._slot]) == self.received


REQUESTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "first choice": {"group_id": "g"},
    "second choice": {"group_id": "g"},
    "drafted": {"speculation": SpeculationParams("ngram", 3)},
    "aborted": {},
    "embedded": {"max_tokens": 0, "pooling": Pooling.MEAN},
    "scored": {"max_tokens": 0, "num_prompt_logprobs": 1},
}
"""Kinds of requests, of which the last two charge their prompts only."""


def test_what_a_consumer_has_of_an_engine_s_events_is_counted(
    tiny_base: Path, tmp_path: Path, path: Path
) -> None:
    engine = LocalEngine(tiny_base, tmp_path, speculation=("ngram",))
    supervisor = SimpleNamespace(send=engine.core.handle, is_ready=True)
    requests = OpenRequests(cast(Any, supervisor), Quarantine(lambda: 0.0), max_requests=9)
    journal = TokenJournal(path, num_slots=8)
    prompt = list(range(20)) * 2
    consumers: dict[str, Consumer] = {}
    streams: dict[str, RequestStream] = {}
    for name, fields in REQUESTS.items():
        (slot,) = journal.open(name.encode(), [True])
        consumers[name] = consumer = Consumer(journal, slot, len(prompt))
        sampling = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=fields.get("max_tokens", 12)
        )
        others = {field: value for field, value in fields.items() if field != "max_tokens"}
        request = GenerationRequest(name, "acme", prompt, sampling, **others)
        streams[name] = requests.submit(request, consumer.take, journal.counter(slot))
    while engine.core.has_work:
        for message in engine.core.step():
            if isinstance(message, StepEvents):
                requests.deliver(message)
        for consumer in consumers.values():
            consumer.check()
        if consumers["aborted"].received.generated:
            streams["aborted"].close()
    received = {name: consumer.received for name, consumer in consumers.items()}
    assert {each.prompt for each in received.values()} == {len(prompt)}
    assert any(each.cached for each in received.values())
    assert 0 < received.pop("aborted").generated < 12
    assert [each.generated for each in received.values()] == [12, 12, 12, 12, 0, 0]
    engine.close()


def make_client(home: Path) -> EngineClient:
    return EngineClient(
        EngineConfig(model=str(home)),
        on_adapter_wanted=fetch_at_once,
        command=FAKE_ENGINE,
        restarts=RestartPolicy(first_delay_seconds=0.01),
    )


def test_a_request_that_a_killed_engine_had_started_keeps_what_was_received(
    tmp_path: Path, path: Path
) -> None:
    async def scenario() -> None:
        journal = TokenJournal(path, num_slots=4)
        client = make_client(tmp_path)
        await client.start()
        (slot,) = journal.open(b"hangs", [True])
        stream = client.submit(make_request("hangs", HANG), counter=journal.counter(slot))
        assert isinstance(await anext(stream), RequestStarted)
        assert isinstance(await anext(stream), TokensGenerated)
        kill(client)
        assert error_of(await collect(stream)).code == "engine_restarted"
        assert journal.counts([slot]) == Counts(prompt=1, generated=1)
        await client.stop()

    asyncio.run(scenario())


def test_a_request_that_is_tried_again_is_counted_once(tmp_path: Path, path: Path) -> None:
    async def scenario() -> None:
        journal = TokenJournal(path, num_slots=4)
        client = make_client(tmp_path)
        await client.start()
        (slot,) = journal.open(b"queued", [True])
        stream = client.submit(make_request("queued", QUEUE), counter=journal.counter(slot))
        kill(client)
        events = await collect(stream)
        assert len(tokens_of(events)) == 4
        assert journal.counts([slot]) == Counts(prompt=1, generated=4)
        await until(lambda: client.num_open_requests == 0)
        await client.stop()

    asyncio.run(scenario())
