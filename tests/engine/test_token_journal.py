"""After any crash the journal has what was counted before it."""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

from loraplex.engine import token_journal
from loraplex.engine.config import EngineConfig
from loraplex.engine.process.client import EngineClient
from loraplex.engine.process.supervisor import RestartPolicy
from loraplex.engine.token_journal import (
    MAX_OUTCOME_BYTES,
    MAX_OWNER_BYTES,
    SLOT_BYTES,
    Counts,
    JournalCounters,
    JournalFull,
    TokenJournal,
)
from support.engine import LocalEngine
from support.fake_client import (
    FAKE_ENGINE,
    collect,
    fetch_at_once,
    kill,
    make_request,
    submit_started,
    until,
)
from support.fake_engine import HANG, QUEUE

NUM_SLOTS = 6


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_an_earlier_life_leaves_its_requests_and_their_counts(path: Path) -> None:
    journal = TokenJournal(path, num_slots=NUM_SLOTS)
    running = journal.open(b"running", [True, False])
    decided = journal.open(b"decided", [True])
    journal.free(journal.open(b"over", [True]))
    counters = JournalCounters(path)
    for slot in running:
        counters.start(slot, num_prompt_tokens=7, num_cached_tokens=2)
        counters.generate(slot, 5)
    journal.close_request(decided, b"outcome")
    journal.close()
    counters.close()

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
    counters = JournalCounters(path)
    slots = journal.open(b"first", [True])
    counters.start(slots[0], num_prompt_tokens=7, num_cached_tokens=2)
    counters.generate(slots[0], 5)
    journal.free(slots)
    assert journal.open(b"second", [True]) == slots
    assert journal.counts(slots) == Counts(0, 0, 0)


def test_each_sequence_that_accounts_for_its_prompt_is_counted_once_it_has_begun(
    path: Path,
) -> None:
    journal = TokenJournal(path, num_slots=4)
    counters = JournalCounters(path)
    slots = journal.open(b"owner", [True, True, False, True])
    for slot, prompt, cached in zip(slots, (7, 5, 9, 0), (2, 1, 3, 4), strict=True):
        counters.start(slot, num_prompt_tokens=prompt, num_cached_tokens=cached)
        counters.generate(slot, 10)
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


@pytest.mark.skipif(not hasattr(mmap, "MAP_POPULATE"), reason="other systems map lazily")
def test_an_engine_has_all_pages_of_the_journal_from_the_start(path: Path) -> None:
    journal = TokenJournal(path, num_slots=1024)
    reading = (
        "import sys; from pathlib import Path; "
        "from loraplex.engine.token_journal import JournalCounters; "
        "counters = JournalCounters(Path(sys.argv[1])); "
        "print(Path('/proc/self/smaps').read_text().partition(sys.argv[1])[2])"
    )
    command = [sys.executable, "-c", reading, str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    mapping = subprocess.check_output(command, text=True, env=environment)
    resident = re.search(r"Rss: +(\d+) kB", mapping)
    assert resident is not None
    assert int(resident[1]) * 1024 == 1024 * SLOT_BYTES
    journal.close()


def test_nobody_reads_while_an_engine_of_an_earlier_life_counts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TokenJournal(path, num_slots=1).close()
    counting = "import sys; from pathlib import Path; "
    counting += "from loraplex.engine.token_journal import JournalCounters; "
    counting += "c = JournalCounters(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", counting, path], stdin=pipe, stdout=pipe, env=environment
    ) as engine:
        assert engine.stdout is not None
        engine.stdout.readline()
        monkeypatch.setattr(token_journal, "WRITER_SECONDS", 0.05)
        with pytest.raises(TimeoutError):
            TokenJournal(path)
        monkeypatch.setattr(token_journal, "WRITER_SECONDS", 60.0)
        threading.Timer(0.1, engine.kill).start()
        TokenJournal(path, num_slots=1).close()
        assert engine.wait() == -9


class JournalMachine(RuleBasedStateMachine):
    """Against a dictionary, over deaths of the engine, of the parent and of both."""

    requests: Bundle[bytes] = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="loraplex-journal-"))
        self.path = self.directory / "journal"
        self.model: dict[bytes, tuple[tuple[int, ...], list[list[int]], bytes | None]] = {}
        self.number = 0
        self.journal = TokenJournal(self.path, num_slots=NUM_SLOTS)
        self.counters = JournalCounters(self.path)

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
    def count(self, owner: bytes, index: int, start: int, tokens: int) -> None:
        if owner in self.model:
            slots, counts, _ = self.model[owner]
            index %= len(slots)
            self.counters.start(slots[index], num_prompt_tokens=start, num_cached_tokens=start // 2)
            self.counters.generate(slots[index], tokens)
            counts[index][1:] = [start, start // 2, tokens]

    @rule(owner=requests, outcome=st.binary(min_size=1, max_size=MAX_OUTCOME_BYTES))
    def close_request(self, owner: bytes, outcome: bytes) -> None:
        if owner in self.model:
            slots, counts, _ = self.model[owner]
            self.journal.close_request(slots, outcome)
            self.model[owner] = (slots, counts, outcome)

    @rule(owner=consumes(requests))
    def free(self, owner: bytes) -> None:
        if owner in self.model:
            self.journal.free(self.model.pop(owner)[0])

    @rule()
    def parent_dies(self) -> None:
        self.counters.close()
        self.journal.close()
        self.journal = TokenJournal(self.path, num_slots=NUM_SLOTS)
        self.counters = JournalCounters(self.path)
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
        self.parent_dies()
        self.counters.close()
        self.journal.close()
        self.path.unlink()
        self.directory.rmdir()


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_engine_counts_every_token_that_it_gives(tiny_base: Path, tmp_path: Path) -> None:
    engine = LocalEngine(tiny_base, tmp_path)
    path = tmp_path / "journal"
    journal = TokenJournal(path, num_slots=8)
    engine.core.count_tokens_in(JournalCounters(path))
    prompt = list(range(40))
    slots: dict[str, int] = {}
    for group, name in [(None, "a"), ("g", "b"), ("g", "c"), (None, "stopped")]:
        (slot,) = journal.open(name.encode(), [True])
        engine.submit(
            prompt,
            request_id=name,
            group_id=group,
            max_tokens=12,
            ignore_eos=True,
            journal_slot=slot,
        )
        slots[name] = slot
    num_steps = 0
    while engine.core.has_work:
        engine.step()
        num_steps += 1
        if num_steps == 4:
            engine.abort("stopped")
        for name, slot in slots.items():
            answer = engine.answers[name]
            prompt_tokens = len(prompt) if answer.started else 0
            cached = answer.started.num_cached_tokens if answer.started else 0
            assert journal.counts([slot]) == Counts(prompt_tokens, cached, len(answer.token_ids))
    assert 0 < len(engine.answers["stopped"].token_ids) < 12
    assert any(journal.counts([slot]).cached for slot in slots.values())
    engine.close()


def make_client(home: Path, journal: TokenJournal) -> EngineClient:
    return EngineClient(
        EngineConfig(model=str(home)),
        on_adapter_wanted=fetch_at_once,
        command=FAKE_ENGINE,
        restarts=RestartPolicy(first_delay_seconds=0.01),
        journal=journal,
    )


def test_requests_are_gone_when_their_engine_says_so_or_is_dead(tmp_path: Path, path: Path) -> None:
    async def scenario() -> None:
        journal = TokenJournal(path, num_slots=4)
        client = make_client(tmp_path, journal)
        await client.start()
        (first,), (second,) = journal.open(b"first", [True]), journal.open(b"second", [True])
        hanging = replace(make_request("first", HANG), journal_slot=first)
        stream = await submit_started(client, hanging)
        waiting = asyncio.create_task(client.until_gone(["first", "never there"]))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await stream.aclose()
        await waiting
        assert journal.counts([first]) == Counts(prompt=1, generated=1)

        stream = await submit_started(client, replace(hanging, request_id="b", journal_slot=second))
        waiting = asyncio.create_task(client.until_gone(["b"]))
        kill(client)
        await waiting
        assert journal.counts([second]) == Counts(prompt=1, generated=1)
        await collect(stream)
        await client.stop()

    asyncio.run(scenario())


def test_what_a_dead_engine_did_for_a_request_that_is_tried_again_is_not_counted(
    tmp_path: Path, path: Path
) -> None:
    async def scenario() -> None:
        journal = TokenJournal(path, num_slots=4)
        client = make_client(tmp_path, journal)
        await client.start()
        (slot,) = journal.open(b"queued", [True])
        stream = client.submit(replace(make_request("queued", QUEUE), journal_slot=slot))
        JournalCounters(path).generate(
            slot, 99
        )  # seen by nobody: its events never left the process
        kill(client)
        await collect(stream)
        assert journal.counts([slot]) == Counts(prompt=1, generated=4)
        await until(lambda: client.num_open_requests == 0)
        await client.stop()

    asyncio.run(scenario())
