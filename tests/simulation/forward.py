"""One simulated forward pass: its results and its failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from loraplex.adapters.leases import Lease
from loraplex.engine.execution.execution import Drawn, Sampled
from loraplex.engine.messages import TokensGenerated
from loraplex.engine.request import Request
from loraplex.engine.scheduling.batch import ScheduledSequence
from support.block_tables import blocks_of, tables_of, targets_of
from support.manager import FakeArena

from .contents import NAN, Contents, next_token
from .device import Computed, FakeDevice
from .violation import Invariant, require


class Faults(NamedTuple):
    """What goes wrong in one step's forward."""

    nan: frozenset[str] = frozenset()
    """Requests whose rows are not finite."""
    raises: bool = False
    """The batch as a whole cannot run; its sequences can, one by one."""
    poison: frozenset[str] = frozenset()
    """Requests that cannot run alone either."""
    nan_drafts: bool = False
    """No row of a draft token is finite."""
    crash: frozenset[str] = frozenset()
    """Requests of which the device dies."""
    spreads: bool = False
    """Nor is any row before it: what is masked enters its sums with a weight of zero."""


NO_FAULTS = Faults()


class Rows:
    """What a step says of its logits rows: here the values of their positions."""

    hidden_states = None
    features = None

    def __init__(self, wait: Callable[[], None]) -> None:
        """wait: returns once the step was computed and has set the values."""
        self._wait = wait
        self.values: list[int] = []
        self.token_states: list[int] = []
        """Those of all rows."""

    @property
    def finite(self) -> list[bool]:
        self._wait()
        return [value != NAN for value in self.values]


class StepFailed(Exception):
    """A step raised."""


class DeviceCrashed(BaseException):
    """The process dies of a step."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"{request_id} crashed the device")
        self.request_id = request_id
        """The request that caused it."""


class FakeForward:
    """In the place of `ModelRunner`."""

    def __init__(
        self,
        device: FakeDevice,
        arena: FakeArena,
        contents: dict[str, Contents],
        live: Callable[[], Iterable[Request]],
    ) -> None:
        """`live`: every request that may hold blocks."""
        self.faults = NO_FAULTS
        self.counts: Counter[str] = Counter()
        self._device = device
        self._arena = arena
        self._contents = contents
        self._live = live
        self._spoiled: set[Request] = set()
        self._num_begun = 0
        self._num_read = 0

    def is_current(self, sequence: ScheduledSequence) -> bool:
        if sequence.lease is None and sequence.end <= sequence.request.adapter_start:
            return True
        return self.has_its_adapter(sequence.request, sequence.lease)

    def has_its_adapter(self, request: Request, lease: Lease | None) -> bool:
        """Whether the row that the lease names holds the request's adapter."""
        adapter = request.submitted.adapter
        if adapter is None or lease is None:
            return adapter is None
        return self._arena.published.get(lease.row) == (adapter, lease.generation)

    def begin(self, sequences: tuple[ScheduledSequence, ...]) -> Callable[[], Rows]:
        rows = self.run(sequences, None)
        self._num_begun += 1
        number = self._num_begun

        def compute() -> Rows:
            require(
                number == self._num_read + 1,
                Invariant.AS_PLAIN,
                f"step {number} is read after step {self._num_read}",
            )
            self._num_read = number
            return rows

        return compute

    def run(self, sequences: tuple[ScheduledSequence, ...], sampled: Sampled | None) -> Rows:
        for sequence in sequences:
            num_known = len(sequence.request.token_ids)
            require(
                sampled is not None or sequence.known_end <= num_known,
                Invariant.AS_PLAIN,
                f"{sequence.request.request_id} goes on from a token that nobody knows",
            )
        faults = self.faults
        ids = {sequence.request.request_id for sequence in sequences}
        num_draft_tokens = sum(sequence.num_draft_tokens for sequence in sequences)
        if ids & faults.poison or (faults.raises and len(sequences) + num_draft_tokens > 1):
            raise StepFailed
        all_tables = [blocks_of(request.kv) for request in self._live()]
        num_owners = [
            Counter(chain.from_iterable(tables)) for tables in zip(*all_tables, strict=True)
        ]
        entries = [
            _Entry(
                sequence,
                self._contents[sequence.request.request_id],
                tables_of(sequence.request.kv),
                targets_of(sequence.request.kv) if sequence.compacts else [],
                sequence.request.kv.num_evicted,
                faults,
                sampled,
            )
            for sequence in sequences
        ]

        def compute() -> None:
            self._check_leases(sequences)
            self.counts["computed_in_vain"] += sum(entry.request.has_ended for entry in sequences)
            if crashing := sorted(ids & faults.crash):
                raise DeviceCrashed(crashing[0])
            rows = [entry.compute(self._spoiled, self.counts) for entry in entries]
            self._device.run(rows, num_owners)
            for sequence, row in zip(sequences, rows, strict=True):
                output.values += row.values[-sequence.num_logits_rows :]
                output.token_states += row.values

        output = Rows(lambda: self._device.wait_for(compute))
        self._device.launch(compute)
        return output

    def _check_leases(self, sequences: Iterable[ScheduledSequence]) -> None:
        """Also of those that have ended meanwhile: the step reads their adapters."""
        for sequence in sequences:
            require(
                self.is_current(sequence),
                Invariant.LEASE_IS_ROW,
                f"{sequence.request.request_id} is computed, its adapter is gone",
            )

    def keep(self, request: Request, path: Sequence[int]) -> None:
        require(list(path) == list(range(len(path))), Invariant.AS_PLAIN, f"{path} of a chain")

    def clear(self, request: Request, start: int, end: int) -> None:
        kv = request.kv
        self._device.clear(tables_of(kv), start - kv.num_evicted, end - kv.num_evicted)


class _Entry(NamedTuple):
    """A sequence as it was when its step was launched."""

    sequence: ScheduledSequence
    contents: Contents
    tables: list[list[int]]
    targets: list[list[int]]
    num_evicted: int
    faults: Faults
    sampled: Sampled | None

    def compute(self, spoiled: set[Request], counts: Counter[str]) -> Computed:
        """spoiled: the requests that have values which are not finite."""
        request, start, end = self.sequence.request, self.sequence.start, self.sequence.known_end
        tokens = request.token_ids
        if end > len(tokens):  # it ended, and nobody wants to know the token that it goes on from
            assert self.sampled is not None
            tokens = [*tokens, self.sampled.draws.token_of(request)]
        values = self.contents.up_to(tokens, end)
        before, known = values[self.num_evicted : start], values[start:end]
        drafted: list[int] = []
        if self.sequence.num_draft_tokens:
            drafted = self.contents.behind(request.draft.token_ids)
        if drafted and self.faults.nan_drafts:
            counts["nan_drafts"] += 1
            drafted = [NAN] * len(drafted)
            known = [NAN] if self.faults.spreads else known
        if request.request_id in self.faults.nan:
            spoiled.add(request)
            known, drafted = [NAN] * len(known), [NAN] * len(drafted)
        return Computed(
            request.request_id,
            self.contents.owner,
            self.tables,
            start - self.num_evicted,
            None if request in spoiled else before,
            [*known, *drafted],
            self.targets,
            request.kv.eviction.budget if request.kv.eviction else 0,
        )


class FakeDraws:
    """The next token follows from the value of the last position, so from all before it."""

    def __init__(self, requests: Sequence[Request], output: Rows, rows: Sequence[int]) -> None:
        self._drafts = [request.draft.token_ids for request in requests]
        self._requests = requests
        self._output = output
        self._rows = rows

    def read(self) -> list[Drawn]:
        values = iter([self._output.values[row] for row in self._rows])
        drawn = []
        for request, drafted in zip(self._requests, self._drafts, strict=True):
            tokens = [next_token(next(values), request.seed) for _ in range(1 + len(drafted))]
            pairs = zip(tokens, drafted, strict=False)
            right = [token == draft_token for token, draft_token in pairs]
            num_right = right.index(False) if False in right else len(right)
            generated = TokensGenerated(request.request_id, tokens[: num_right + 1])
            drawn.append(Drawn(range(num_right), generated))
        is_over = next(values, None) is None
        require(is_over, Invariant.AS_PLAIN, "there are more rows than draft tokens")
        return drawn

    def token_of(self, request: Request) -> int:
        """What the device samples for a request without a draft."""
        row = self._rows[self._requests.index(request)]
        return next_token(self._output.values[row], request.seed)
