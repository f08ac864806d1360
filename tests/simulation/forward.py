"""One simulated forward pass: its results and its failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from loraplex.engine.execution.execution import Drawn
from loraplex.engine.messages import TokensGenerated
from loraplex.engine.request import Request
from loraplex.engine.scheduling.batch import ScheduledSequence
from support.block_tables import tables_of
from support.manager import FakeArena

from .contents import NAN, Contents, next_token
from .device import FakeDevice
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
    spreads: bool = False
    """Nor is any row before it: what is masked enters its sums with a weight of zero."""


NO_FAULTS = Faults()


class Rows(NamedTuple):
    """What a step says of its logits rows: here the values of their positions."""

    values: list[int]
    token_states: list[int]
    """Those of all rows."""
    hidden_states: None = None

    @property
    def finite(self) -> list[bool]:
        return [value != NAN for value in self.values]


class StepFailed(Exception):
    """A step raised."""


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

    def is_current(self, sequence: ScheduledSequence) -> bool:
        return self.has_its_adapter(sequence.request)

    def has_its_adapter(self, request: Request) -> bool:
        """Whether the row that the lease names holds the request's adapter."""
        adapter, lease = request.submitted.adapter, request.lease
        if adapter is None or lease is None:
            return adapter is None
        return self._arena.published.get(lease.row) == (adapter, lease.generation)

    def run(self, sequences: tuple[ScheduledSequence, ...]) -> Rows:
        ids = {sequence.request.request_id for sequence in sequences}
        num_draft_tokens = sum(sequence.num_draft_tokens for sequence in sequences)
        if ids & self.faults.poison or (
            self.faults.raises and len(sequences) + num_draft_tokens > 1
        ):
            raise StepFailed
        computed = [self._compute(sequence) for sequence in sequences]
        tables = [tables_of(request.kv) for request in self._live()]
        self._device.run(sequences, self._contents, computed, tables)
        kept = zip(sequences, computed, strict=True)
        return Rows(
            [value for entry, row in kept for value in row[-entry.num_logits_rows :]],
            [value for row in computed for value in row],
        )

    def keep(self, request: Request, path: Sequence[int]) -> None:
        require(list(path) == list(range(len(path))), Invariant.AS_PLAIN, f"{path} of a chain")

    def clear(self, request: Request, start: int, end: int) -> None:
        self._device.clear(tables_of(request.kv), start, end)

    def _compute(self, sequence: ScheduledSequence) -> list[int]:
        request, faults = sequence.request, self.faults
        contents = self._contents[request.request_id]
        end = sequence.context_len - sequence.num_draft_tokens
        known = contents.up_to(request.token_ids, end)[request.num_computed_tokens : end]
        drafted = contents.behind(request.draft.token_ids) if sequence.num_draft_tokens else []
        if drafted and faults.nan_drafts:
            self.counts["nan_drafts"] += 1
            drafted = [NAN] * len(drafted)
            known = [NAN] if faults.spreads else known
        if request.request_id in faults.nan:
            return [NAN] * (len(known) + len(drafted))
        return [*known, *drafted]


def draw(requests: Sequence[Request], output: Rows, rows: Sequence[int]) -> list[Drawn]:
    """The next token follows from the value of the last position, so from all before it."""
    values = iter([output.values[row] for row in rows])
    drawn = []
    for request in requests:
        drafted = request.draft.token_ids
        tokens = [next_token(next(values), request.seed) for _ in range(1 + len(drafted))]
        right = [token == draft_token for token, draft_token in zip(tokens, drafted, strict=False)]
        num_right = right.index(False) if False in right else len(right)
        generated = TokensGenerated(request.request_id, tokens[: num_right + 1])
        drawn.append(Drawn(range(num_right), generated))
    require(next(values, None) is None, Invariant.AS_PLAIN, "there are more rows than draft tokens")
    return drawn
