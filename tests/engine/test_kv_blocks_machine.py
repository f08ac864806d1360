"""KvBlocks with tensors that are simulated by dictionaries.

A position's keys and values depend on the namespace and all tokens up to it, so the simulated
tensors store these. Whatever a sequence reads must be its own.

With open blocks, as of formats that quantize complete blocks, a sequence reads its own block in its
open slot and complete blocks as they were when their last token was written.

Some sequences are compacted: here their last tokens stay. Some are endless: from a number of places
on, what all windows have left loses its places.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.kv.block_pool import NULL_BLOCK
from loraplex.engine.kv.blocks import KvBlocks
from loraplex.engine.kv.eviction import NEVER, EvictionPlan
from loraplex.engine.kv.layout import (
    CopyBlock,
    EraseOnDisk,
    GiveBackBlocks,
    KvGroup,
    KvOperation,
    RestoreBlocks,
    SwapIn,
    SwapOut,
    ZeroBlocks,
)
from loraplex.engine.kv.prefix_cache import ROOT_KEY, CacheNamespace, PrefixHasher
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.kv_policy import EvictionMethod
from loraplex.kernels.attention_window import AttentionWindow
from support.block_tables import tables_of

SIZE = 2
SECRET = b"s" * 32
ADAPTER = AdapterKey("acme", "sha256:aa")
NAMESPACES = [
    CacheNamespace(tenant, "runtime", adapter)
    for tenant in ("acme", "globex")
    for adapter in (None, ADAPTER)
]
Content = tuple[CacheNamespace, tuple[int, ...]]
"""A namespace and all tokens up to a position."""

LAYOUTS = [
    [KvGroup((0,), None, 0, 9)],
    [KvGroup((0,), None, 0, 20)],
    [KvGroup((0,), AttentionWindow(3), 0, 7)],
    [KvGroup((0,), None, 0, 11), KvGroup((1,), AttentionWindow(4), 0, 8)],
    [KvGroup((0,), None, 0, 10), KvGroup((1,), AttentionWindow(2), 3, 9)],
    [KvGroup((0,), None, 0, 12), KvGroup((1,), AttentionWindow(6, is_chunked=True), 0, 9)],
    [KvGroup((0,), AttentionWindow(4), 0, 9), KvGroup((1,), AttentionWindow(2), 3, 9)],
]
BORDERED = [KvGroup((0,), None, 0, 14, num_more=2, num_less=5, gives_end=True)]
"""The last blocks of its pool come and go."""
SLIDES_AT = 10
"""Places of an endless sequence."""
MAX_TOKENS = 20
ENDLESS_TOKENS = 80


@dataclass(eq=False)
class Sequence:
    kv: SequenceBlocks
    namespace: CacheNamespace
    token_ids: list[int]
    num_computed: int = 0
    num_scheduled: int = 0
    kept: list[Content] = field(default_factory=list)
    """What the last compaction left, in its first places."""
    num_sink_places: int = 0
    """The first places, which an endless sequence never gives to others."""

    @property
    def is_endless(self) -> bool:
        return self.kv.slides_at == SLIDES_AT

    @property
    def num_cached(self) -> int:
        return self.num_computed - self.kv.num_evicted

    def content(self, position: int) -> Content:
        return self.namespace, tuple(self.token_ids[: position + 1])

    def content_at(self, place: int) -> Content:
        if place < len(self.kept):
            return self.kept[place]
        if place < self.num_sink_places:
            return self.content(place)
        return self.content(place + self.kv.num_evicted)


@dataclass
class PlayedTensors:
    """Blocks and host slots by (group, id); a position that was cleared holds None."""

    device: dict[tuple[int, int], list[Content | None]] = field(default_factory=dict)
    host: dict[tuple[int, int], list[Content | None]] = field(default_factory=dict)
    open: dict[tuple[int, int], list[Content | None]] = field(default_factory=dict)
    """By (group, slot)."""
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    """By (group, block id), that of each open block; also of some that are not open any more."""
    counts: Counter[str] = field(default_factory=Counter)
    """Blocks copied and swapped in."""

    def execute(self, operations: list[KvOperation]) -> None:
        for operation in operations:
            assert not isinstance(operation, EraseOnDisk), "there is no disk"
            group = operation.group
            match operation:
                case ZeroBlocks():
                    for block_id in operation.block_ids:
                        self.device[group, block_id] = [None] * SIZE
                    if operation.open_slots:
                        for block_id, slot in zip(
                            operation.block_ids, operation.open_slots, strict=True
                        ):
                            self.slots[group, block_id] = slot
                            self.open[group, slot] = [None] * SIZE
                case GiveBackBlocks():
                    for block_id in operation.block_ids:
                        self.device[group, block_id] = [None] * SIZE
                case RestoreBlocks():
                    pass
                case CopyBlock():
                    copied = self.device[group, operation.source]
                    self.device[group, operation.target] = list(copied)
                    self.counts["copies"] += 1
                    if operation.open_slot is not None:
                        source = self.open[group, self.slots[group, operation.source]]
                        self.slots[group, operation.target] = operation.open_slot
                        self.open[group, operation.open_slot] = list(source)
                case SwapOut():
                    for block_id, slot in zip(
                        operation.block_ids, operation.host_slots, strict=True
                    ):
                        block: list[Content | None] = [None] * SIZE
                        if block_id != NULL_BLOCK:
                            block = list(self.device[group, block_id])
                        self.host[group, slot] = block
                case SwapIn():
                    for block_id, slot in zip(
                        operation.block_ids, operation.host_slots, strict=True
                    ):
                        self.device[group, block_id] = list(self.host[group, slot])
                        self.counts["swapped in"] += 1
        assert all(block_id != NULL_BLOCK for _, block_id in self.device)


class KvBlocksMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(
        layout=st.sampled_from([*LAYOUTS, BORDERED]),
        num_slots=st.integers(0, 12),
        cache=st.booleans(),
        num_open_slots=st.none() | st.integers(5, 20),
    )
    def start(
        self,
        layout: list[KvGroup],
        num_slots: int,
        cache: bool,
        num_open_slots: int | None = None,
    ) -> None:
        """A chunk of 8 tokens is in up to 5 blocks."""
        self.layout = layout
        self.opens = num_open_slots is not None
        self.compacts = not self.opens and all(group.window is None for group in layout)
        self.slides = all(group.window and not group.window.is_chunked for group in layout)
        self.kv = KvBlocks(
            layout,
            SIZE,
            prefix_secret=SECRET if cache else None,
            num_swap_slots=[num_slots] * len(layout),
            num_open_slots=num_open_slots,
            tenant_cap=0.6,
        )
        self.tensors = PlayedTensors()
        self.live: list[Sequence] = []
        self.hasher = PrefixHasher(SIZE, secret=SECRET)
        for group in self.kv.groups:
            if group.layout.window is None:
                self._watch_evictions(group.index)

    def _watch_evictions(self, index: int) -> None:
        """Without windows nothing is forgotten before what builds on it, unless that is in use."""
        group = self.kv.groups[index]
        evict = group.pool.on_reuse
        assert evict is not None

        def check(block_id: int) -> None:
            prefix = group.cached.prefix_of(block_id)
            if prefix is not None:
                for other_id, other in group.cached._prefixes.items():
                    assert other.parent != prefix.key or group.pool.ref_count(other_id), (
                        f"{block_id} is evicted before its child {other_id}"
                    )
            evict(block_id)

        group.pool.on_reuse = check

    @rule(
        target=sequences,
        namespace=st.sampled_from(NAMESPACES),
        num_common=st.integers(1, 10),
        token_ids=st.lists(st.integers(0, 1), max_size=4),
        method=st.none() | st.sampled_from(EvictionMethod),
        budget=st.integers(2, 6),
        is_endless=st.booleans(),
    )
    def admit(
        self,
        namespace: CacheNamespace,
        num_common: int,
        token_ids: list[int],
        method: EvictionMethod | None = None,
        budget: int = 2,
        *,
        is_endless: bool = False,
    ) -> Sequence:
        token_ids = [0] * num_common + token_ids
        plan = EvictionPlan(method, budget, len(token_ids), SIZE) if method else None
        kv = self.kv.new_sequence(
            plan if self.compacts else None,
            slides_at=SLIDES_AT if is_endless and self.slides else NEVER,
        )
        sequence = Sequence(kv, namespace, token_ids)
        if sequence.is_endless:
            sequence.num_sink_places = SIZE * max(map(num_sink_blocks, self.layout))
        self.live.append(sequence)
        self._match(sequence)
        return sequence

    def _match(self, sequence: Sequence) -> None:
        sequence.num_computed = self.kv.match(sequence.kv, sequence.namespace, sequence.token_ids)
        if sequence.kv.num_to_fetch:
            self._grow(sequence, 1)
        if sequence.kv.num_to_fetch:  # no room: it may not wait with what it has found
            self.kv.release(sequence.kv)
            sequence.num_computed = 0
        assert sequence.num_computed < len(sequence.token_ids)

    @rule(target=sequences, parent=sequences, back=st.integers(0, 3))
    def fork(self, parent: Sequence, back: int) -> Sequence:
        """As for a request of the same prompt, and for one that goes another way from there."""
        token_ids = [*parent.token_ids[: max(parent.num_computed - back + 1, 1)], 1, 1]
        child = Sequence(self.kv.new_sequence(), parent.namespace, token_ids)
        self.live.append(child)
        num_tokens = parent.num_computed - back
        if num_tokens > 0 and self.kv.fork(parent.kv, child.kv, num_tokens):
            child.num_computed = num_tokens
        else:
            # An own block that is swapped out, compacted or complete cannot be continued.
            is_elsewhere = parent.kv.is_swapped or parent.kv.num_evicted
            assert back or num_tokens <= 0 or is_elsewhere
        return child

    @rule(sequence=sequences, num_tokens=st.integers(1, 8))
    def schedule(self, sequence: Sequence, num_tokens: int) -> None:
        if not tables_of(sequence.kv)[0] and sequence in self.live:
            self._match(sequence)
        self._grow(sequence, num_tokens)

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        num_tokens = min(num_tokens, len(sequence.token_ids) - sequence.num_computed)
        num_tokens = min(num_tokens, sequence.kv.compacts_at - sequence.num_computed)
        if sequence not in self.live or sequence.num_scheduled or not num_tokens:
            return
        computed = sequence.num_computed
        missing = self.kv.num_missing(sequence.kv, computed, num_tokens)
        possible = all(
            count <= self.kv.num_free(group.index)
            and group.can_open(sequence.kv, computed, num_tokens)
            for group, count in zip(self.kv.groups, missing, strict=True)
        )
        held = tables_of(sequence.kv)
        assert self.kv.grow(sequence.kv, computed, num_tokens) == possible
        if possible:
            sequence.num_scheduled = num_tokens
            return
        assert held == tables_of(sequence.kv), "all groups or none"
        alone = not any(other is not sequence and self.kv.share(other.kv) for other in self.live)
        plan = sequence.kv.eviction
        assert not (alone and self.kv.fits_alone(computed + num_tokens, num_tokens, plan))

    @rule(chunk=st.integers(1, 8), order=st.randoms(use_true_random=False))
    def step(self, chunk: int, order: Random) -> None:
        """What can run runs: promises are executed, contents read and written."""
        for sequence in order.sample(self.live, len(self.live)):
            self._grow(sequence, chunk)
        self.tensors.execute(self.kv.operations.take())
        self._check_contents()
        for sequence in self.live:
            self._write(sequence)
        for sequence in self.live:
            if sequence.num_scheduled:
                self._advance(sequence)
        self._check_contents()

    def _advance(self, sequence: Sequence) -> None:
        sequence.num_computed += sequence.num_scheduled
        sequence.num_scheduled = 0
        kept = [sequence.content_at(place) for place in range(sequence.num_cached)]
        num_evicted = sequence.kv.num_evicted
        is_compacted = sequence.num_computed == sequence.kv.compacts_at
        self.kv.advance(sequence.kv, sequence.namespace, sequence.token_ids, sequence.num_computed)
        if is_compacted:
            assert sequence.kv.eviction is not None
            sequence.kept = kept[-sequence.kv.eviction.budget :]
            self.tensors.counts["compactions"] += 1
        elif sequence.kv.num_evicted > num_evicted:
            assert sequence.is_endless
            self.tensors.counts["slides"] += 1
        if sequence.is_endless:  # no more than the windows and what was left in a step
            assert sequence.num_cached < SLIDES_AT + 8
        longest = ENDLESS_TOKENS if sequence.is_endless else MAX_TOKENS
        if sequence.num_computed == len(sequence.token_ids) < longest:
            sequence.token_ids.append(sequence.num_computed % 2)

    def _write(self, sequence: Sequence) -> None:
        end = sequence.num_computed + sequence.num_scheduled
        for group, table in enumerate(tables_of(sequence.kv)):
            for position in range(sequence.num_computed, end):
                place = position - sequence.kv.num_evicted
                block_id = table[place // SIZE]
                assert block_id != NULL_BLOCK
                block = self.tensors.device[group, block_id]
                if not self.opens:
                    block[place % SIZE] = sequence.content(position)
                    continue
                opened = self.kv.groups[group].open
                assert opened is not None
                assert block_id in opened
                slot = self.tensors.slots[group, block_id]
                self.tensors.open[group, slot][position % SIZE] = sequence.content(position)
                if position % SIZE == SIZE - 1:
                    block[:] = self.tensors.open[group, slot]

        if sequence.kv.targets and sequence.num_scheduled:
            self._compact(sequence, end - sequence.kv.num_evicted)

    def _compact(self, sequence: Sequence, num_cached: int) -> None:
        """Write what stays to the targets, which nobody else holds."""
        assert sequence.kv.eviction is not None
        budget = sequence.kv.eviction.budget
        for group, target in enumerate(sequence.kv.targets):
            for place in range(budget):
                block_id = target.item(place // SIZE)
                assert self.kv.groups[group].pool.ref_count(block_id) == 1
                content = sequence.content_at(num_cached - budget + place)
                self.tensors.device[group, block_id][place % SIZE] = content

    @rule(sequence=sequences)
    def preempt(self, sequence: Sequence) -> None:
        self.kv.release(sequence.kv)
        sequence.kept = []
        sequence.num_computed = sequence.num_scheduled = 0

    @rule(sequence=sequences)
    def swap_out(self, sequence: Sequence) -> None:
        if sequence.kv.is_swapped:
            return
        num_kept = self.kv.swap_out(sequence.kv, sequence.num_computed)
        if num_kept:
            assert num_kept == sequence.num_computed - (
                sequence.num_computed % SIZE if self.opens else 0
            )
            sequence.num_computed, sequence.num_scheduled = num_kept, 0
            assert sequence.kv.is_swapped
            assert self.kv.share(sequence.kv) == 0

    @rule(sequence=sequences)
    def finish(self, sequence: Sequence) -> None:
        for _ in range(2):  # a second release changes nothing
            self.kv.release(sequence.kv)
            sequence.kept = []
            sequence.num_computed = sequence.num_scheduled = 0
        sequence.token_ids = sequence.token_ids[:1]
        if sequence in self.live:
            self.live.remove(sequence)

    @rule(count=st.integers(-4, 4))
    def move_border(self, count: int) -> None:
        """The last blocks go out of use, or come back."""
        (group, *_) = self.kv.groups
        pool = group.pool
        if not group.layout.gives_end or self.opens:
            return
        if count < 0:
            group.restore(min(-count, pool.num_withdrawn))
            return
        count = min(count, pool.num_free, pool.num_usable - group.num_lasting)
        held = range(pool.num_blocks - pool.num_withdrawn - count, pool.num_blocks)
        self.tensors.counts["moved held"] += sum(map(bool, map(pool.ref_count, held)))
        self.tensors.counts["moved prefixes"] += len(group.cached._prefixes.keys() & set(held))
        group.withdraw_last(count, [sequence.kv for sequence in self.live])
        self.tensors.execute(self.kv.operations.take())
        first = pool.num_blocks - pool.num_withdrawn
        for (_, block_id), block in self.tensors.device.items():
            assert block_id < first or not any(block), "what others get is not zero"

    @rule()
    def drop_adapter(self) -> None:
        self.kv.drop_adapter(ADAPTER)
        for group in self.kv.groups:
            for cached in (group.cached, group.host.prefixes):
                for prefix in cached._prefixes.values():
                    assert prefix.namespace.adapter != ADAPTER

    @invariant()
    def nothing_is_leaked_or_doubly_owned(self) -> None:
        self.kv.check_integrity(sequence.kv for sequence in self.live)

    def _check_contents(self) -> None:
        for sequence in self.live:
            for index in range(len(self.layout)):
                self._check_readable(sequence, index)
        for index, group in enumerate(self.kv.groups):
            for block_id, prefix in group.cached._prefixes.items():
                self._check_published(prefix.key, self.tensors.device[index, block_id])
            for slot, prefix in group.host.prefixes._prefixes.items():
                self._check_published(prefix.key, self.tensors.host[index, slot])

    def _check_readable(self, sequence: Sequence, group: int) -> None:
        """Every place that the next query sees is there, on the device or on the host."""
        layout = self.layout[group]
        for place in range(sequence.num_cached):
            if (
                layout.window is not None
                and place < layout.window.first_visible(sequence.num_cached)
                and place >= layout.sinks
            ):
                continue
            index = place // SIZE
            if self.opens and index == sequence.num_cached // SIZE:
                block_id = tables_of(sequence.kv)[group][index]
                block = self.tensors.open[group, self.tensors.slots[group, block_id]]
            elif index in sequence.kv.host_slots[group]:
                block = self.tensors.host[group, sequence.kv.host_slots[group][index]]
            else:
                block = self.tensors.device[group, tables_of(sequence.kv)[group][index]]
            assert block[place % SIZE] == sequence.content_at(place)

    def _check_published(self, key: bytes, block: list[Content | None]) -> None:
        """The content is that of one sequence, whose key this is."""
        last = block[-1]
        assert last is not None
        namespace, token_ids = last
        assert block == [
            (namespace, token_ids[: len(token_ids) - SIZE + 1 + i]) for i in range(SIZE)
        ]
        expected = ROOT_KEY
        for start in range(0, len(token_ids), SIZE):
            expected = self.hasher.key(namespace, expected, token_ids[start : start + SIZE])
        assert key == expected

    def teardown(self) -> None:
        for sequence in getattr(self, "live", []):
            self.kv.release(sequence.kv)
        if hasattr(self, "kv"):
            self.kv.check_integrity([])
            for index in range(len(self.layout)):
                assert self.kv.num_free(index) == self.kv.num_usable(index)


TestKvBlocks = KvBlocksMachine.TestCase
TestKvBlocks.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_open_blocks", "num_runs"),
    [(False, 76), (True, 14), pytest.param(True, 60, marks=pytest.mark.slow)],
)
def test_long_walks_reach_every_mechanism(has_open_blocks: bool, num_runs: int) -> None:
    """The machine's rules again, hundreds to a run: hypothesis's own runs are short."""
    reached: Counter[str] = Counter()
    for seed in range(num_runs):
        rng = Random(seed)
        machine = KvBlocksMachine()
        machine.start(
            LAYOUTS[seed % len(LAYOUTS)],
            num_slots=seed % 13,
            cache=seed % 8 != 7,
            num_open_slots=5 + seed % 3 * 5 if has_open_blocks else None,
        )
        for _ in range(200):
            _walk(machine, rng)
            machine.nothing_is_leaked_or_doubly_owned()
            reached["hits"] += sum(seq.num_computed > 0 for seq in machine.live[-1:])
        reached["evictions"] += sum(group.cached.num_evictions for group in machine.kv.groups)
        reached["fetches"] += sum(group.num_fetched for group in machine.kv.groups)
        reached += machine.tensors.counts
        reached["left behind"] += sum(map(any, (seq.kv.num_freed for seq in machine.live)))
        machine.teardown()
    mechanisms = ["hits", "fetches", "copies", "evictions", "swapped in", "left behind", "slides"]
    for mechanism in mechanisms + ["compactions"] * (not has_open_blocks):
        # Swapped sequences and forks end at complete blocks if the others are open.
        assert reached[mechanism] >= (2 if has_open_blocks else 30), reached


@pytest.mark.slow
def test_long_walks_move_what_sequences_and_prefixes_hold_in_the_last_blocks() -> None:
    moved: Counter[str] = Counter()
    for seed in range(20):
        rng, machine = Random(seed), KvBlocksMachine()
        machine.start(BORDERED, num_slots=seed % 13, cache=seed % 4 > 0)
        for _ in range(200):
            machine.move_border(rng.randint(-4, 4))
            _walk(machine, rng)
            machine.nothing_is_leaked_or_doubly_owned()
        moved += machine.tensors.counts
        machine.teardown()
    assert min(moved["moved held"], moved["moved prefixes"], moved["compactions"]) >= 30, moved


def num_sink_blocks(group: KvGroup) -> int:
    return group.num_sink_blocks(SIZE)


def _walk(machine: KvBlocksMachine, rng: Random) -> None:
    if len(machine.live) < 2 or (len(machine.live) < 5 and rng.random() < 0.1):
        tail = [rng.randrange(2) for _ in range(rng.randrange(5))]
        method = rng.choice([None, *EvictionMethod])
        namespace, num_common = rng.choice(NAMESPACES[:2]), rng.randint(1, 10)
        budget, is_endless = rng.randint(2, 4), rng.random() < 0.5
        machine.admit(namespace, num_common, tail, method, budget, is_endless=is_endless)
        return
    sequence = rng.choice(machine.live)
    action = rng.random()
    if action < 0.6:
        machine.step(rng.randint(1, 8), rng)
    elif action < 0.7:
        machine.fork(sequence, rng.choice((0, 0, 1, 2, 3)))
    elif action < 0.8:
        machine.swap_out(sequence)
    elif action < 0.85:
        machine.preempt(sequence)
    elif action < 0.9:
        machine.schedule(sequence, rng.randint(1, 8))
    elif action < 0.98:
        machine.finish(sequence)
    else:
        machine.drop_adapter()
