"""What a step costs, learned from the steps that ran.

seconds ≈ base + per prefill token + per decoding sequence + per position attended to + per drafted
token + what launching kernel by kernel adds, where steps of few tokens are captured as graphs. The
coefficients are fitted online, by least squares over *relative* errors, older observations counting
less: one that took a thousand times as long as expected weighs no more than any other. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .batch import ScheduledSequence

MEMORY = 0.99
"""What each further observation leaves of an earlier one's weight: 0.99 forgets half in 69."""
STIFFNESS = 1e-7
"""Pull towards the last estimate, by the weight of the data: decides only where these don't."""
LEAST_WEIGHT = 1e-6
"""Of a coefficient's data; when forgetting leaves less, its last estimate stands."""
NUM_EAGER_FITS = 64
FIT_INTERVAL = 8
"""One more changes little once so many are known; fitting costs more than taking note."""
NUM_DRAFT_STEPS = 5
"""With draft tokens before what they cost is believed: in the first ones kernels may be compiled,
and the first drafts are few, so that what having any costs would be taken for theirs."""


READ_BYTES_PER_SECOND = 3e8
"""Of a disk that was not read yet, decryption included."""


class StepShape(NamedTuple):
    num_prefill_tokens: int
    num_decodes: int
    num_context_tokens: int
    """Positions already computed that the step's sequences attend to, summed over them."""
    num_draft_tokens: int = 0
    """Draft tokens that decoding sequences verify."""

    @property
    def num_rows(self) -> int:
        return self.num_prefill_tokens + self.num_decodes + self.num_draft_tokens


class RelativeLeastSquares:
    """Non-negative coefficients c that minimize Σ memory^age · ((c·x - y) / y)².

    One that no observation says anything about is 0; one that they no longer say anything about
    stays what it was.
    """

    def __init__(self, num_features: int) -> None:
        self._size = num_features
        self._products = [[0.0] * num_features for _ in range(num_features)]  # Σ x xᵀ / y²
        self._targets = [0.0] * num_features  # Σ x / y
        self.coefficients = [0.0] * num_features
        self.num_observed = [0] * num_features
        """In how many observations each feature was not 0."""

    def observe(self, features: Sequence[float], seconds: float) -> None:
        scaled = [feature / seconds for feature in features]
        for row, left in zip(self._products, scaled, strict=True):
            for column, right in enumerate(scaled):
                row[column] = MEMORY * row[column] + left * right
        self._targets = [
            MEMORY * target + value for target, value in zip(self._targets, scaled, strict=True)
        ]
        if self._is_due(features):
            self.coefficients = self._fit()

    def _is_due(self, features: Sequence[float]) -> bool:
        """Whether to fit: a feature that is new is learned of at once."""
        seen = [index for index, feature in enumerate(features) if feature]
        for index in seen:
            self.num_observed[index] += 1
        counts = [self.num_observed[index] for index in seen]
        return min(counts) <= NUM_EAGER_FITS or max(counts) % FIT_INTERVAL == 0

    def predict(self, features: Sequence[float]) -> float:
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))

    def _fit(self) -> list[float]:
        """Fit all, then without those that came out negative, until none does."""
        kept = list(range(self._size))
        while kept:
            values = self._solve(kept)
            least = min(values)
            if least >= 0:
                break
            kept.pop(values.index(least))
        fitted = dict(zip(kept, values, strict=True)) if kept else {}
        return [fitted.get(index, 0.0) for index in range(self._size)]

    def _solve(self, kept: list[int]) -> list[float]:
        """The normal equations of these features, scaled to a unit diagonal."""
        stiffness = [STIFFNESS * self._products[i][i] + LEAST_WEIGHT for i in kept]
        scales = [
            (self._products[i][i] + pull) ** -0.5 for i, pull in zip(kept, stiffness, strict=True)
        ]
        matrix = [
            [self._products[i][j] * left * right for j, right in zip(kept, scales, strict=True)]
            for i, left in zip(kept, scales, strict=True)
        ]
        vector = []
        for row, (i, pull) in enumerate(zip(kept, stiffness, strict=True)):
            matrix[row][row] = 1.0
            vector.append((self._targets[i] + pull * self.coefficients[i]) * scales[row])
        solution = _eliminate(matrix, vector)
        return [value * scale for value, scale in zip(solution, scales, strict=True)]


def _eliminate(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Solve a small positive definite system in place: Gauss, without pivoting."""
    size = len(vector)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            for column in range(pivot, size):
                matrix[row][column] -= factor * matrix[pivot][column]
            vector[row] -= factor * vector[pivot]
    for row in reversed(range(size)):
        known = sum(matrix[row][column] * vector[column] for column in range(row + 1, size))
        vector[row] = (vector[row] - known) / matrix[row][row]
    return vector


class StepCosts:
    """Nothing observed costs nothing: an engine that knows nothing refuses and defers nothing."""

    def __init__(
        self, swap_bytes_per_second: float = 4e9, *, max_graph_rows: int | None = None
    ) -> None:
        """`swap_bytes_per_second` is believed until the first swap has been observed, and
        `READ_BYTES_PER_SECOND` until the disk was read.

        `max_graph_rows`: the most tokens of a step that runs as one captured graph; None where all
        steps are alike.
        """
        self._max_graph_rows = max_graph_rows
        self._model = RelativeLeastSquares(num_features=5 if max_graph_rows is None else 6)
        self._swap_bytes = 0.0
        self._swap_seconds = 0.0
        self._swap_default = swap_bytes_per_second
        self._read_bytes = 0.0
        self._read_seconds = 0.0
        self.unclaimed_seconds = 0.0
        """Of steps all of whose requests had ended before they were read."""

    def observe(self, shape: StepShape, seconds: float) -> None:
        if seconds > 0:
            self._model.observe(self._features(shape), seconds)

    def observe_swap(self, num_bytes: int, seconds: float) -> None:
        self._swap_bytes = MEMORY * self._swap_bytes + num_bytes
        self._swap_seconds = MEMORY * self._swap_seconds + seconds

    def charge(self, sequences: Sequence[ScheduledSequence], seconds: float) -> None:
        """Divide the seconds of a step among its requests: the shares sum to them.

        Each is charged in proportion to what its tokens cost and an equal part of what any step
        costs; while nothing is known of them, by tokens. What is settled is charged nothing.
        """
        base, prefill, decode, context, draft, *launch = self._model.coefficients
        if self._max_graph_rows is not None:
            num_rows = sum(each.num_tokens for each in sequences)
            base += launch[0] if num_rows > self._max_graph_rows else 0.0
        base /= len(sequences)
        first = base + decode
        weights = [  # in one loop over plain numbers: it runs once a step
            0.0
            if request.is_settled
            else first + context * (start - request.kv.num_evicted)
            if num_tokens == 1
            else (first if num_tokens - num_drafts == 1 else base + prefill * num_tokens)
            + context * max(start - request.kv.num_evicted, 0)
            + draft * num_drafts
            for request, num_tokens, num_drafts, start, _, _ in sequences
        ]
        total = sum(weights)
        if not total:
            weights = [0.0 if each[0].is_settled else each.num_tokens for each in sequences]
            total = sum(weights)
        if not total:
            self.unclaimed_seconds += seconds
            return
        per_weight = seconds / total
        for sequence, weight in zip(sequences, weights, strict=True):
            sequence[0].step_seconds += per_weight * weight

    def predict(self, shape: StepShape) -> float:
        return self._model.predict(self._features(shape))

    def max_prefill_tokens(
        self, decodes: int, context: int, target_seconds: float, limit: int
    ) -> int:
        """Prompt tokens (0 to `limit`) that a step with these decodes takes within the target."""
        seconds_left = target_seconds - self.predict(StepShape(0, decodes, context))
        in_graph = self.num_graph_rows_left(decodes, limit)
        launched = self._tokens_within(seconds_left - self._launch_seconds, limit)
        return launched if launched > in_graph else self._tokens_within(seconds_left, in_graph)

    def _tokens_within(self, seconds: float, limit: int) -> int:
        """Prompt tokens (0 to `limit`) that take no longer."""
        if seconds <= 0:
            return 0
        per_token = self.recompute_seconds(1)
        return limit if per_token * limit <= seconds else int(seconds / per_token)

    def num_graph_rows_left(self, num_decodes: int, limit: int) -> int:
        """How many more tokens (0 to `limit`) such a step takes before it is none for a graph."""
        most = self._max_graph_rows
        return limit if most is None else min(max(most - num_decodes, 0), limit)

    def recompute_seconds(self, num_tokens: int) -> float:
        """What computing these tokens again adds to steps that run anyway."""
        return num_tokens * self._model.coefficients[1]

    def draft_token_seconds(self) -> float:
        """What verifying one draft token adds to a step.

        Until that was seen, what a prompt's token adds: it too is a row of a step that runs anyway.
        """
        return self._model.coefficients[4 if self.knows_draft_tokens else 1]

    @property
    def knows_draft_tokens(self) -> bool:
        """Whether steps with draft tokens were seen, and so many that what they cost is
        believed."""
        return self._model.num_observed[4] >= NUM_DRAFT_STEPS

    def swap_seconds(self, num_bytes: int) -> float:
        """One way; a preemption by swap pays it twice."""
        if self._swap_bytes and self._swap_seconds:
            return num_bytes * self._swap_seconds / self._swap_bytes
        return num_bytes / self._swap_default

    @property
    def knows_prompts(self) -> bool:
        """Whether steps with tokens of prompts were seen."""
        return self._model.num_observed[1] > 0

    def observe_read(self, num_bytes: int, seconds: float) -> None:
        self._read_bytes = MEMORY * self._read_bytes + num_bytes
        self._read_seconds = MEMORY * self._read_seconds + seconds

    def read_seconds(self, num_bytes: int) -> float:
        """Reading from the disk, and decrypting."""
        if self._read_bytes and self._read_seconds:
            return num_bytes * self._read_seconds / self._read_bytes
        return num_bytes / READ_BYTES_PER_SECOND

    def wait_seconds(
        self, num_prefill_tokens: int, num_decode_tokens: int, running: StepShape
    ) -> float:
        """Until so many queued tokens are worked off by steps that decode as `running` does."""
        decodes = max(running.num_decodes, 1)
        step = self.predict(StepShape(0, decodes, running.num_context_tokens))
        return self.recompute_seconds(num_prefill_tokens) + num_decode_tokens * step / decodes

    @property
    def _launch_seconds(self) -> float:
        """What launching each kernel separately adds to a step."""
        return 0.0 if self._max_graph_rows is None else self._model.coefficients[5]

    def _features(self, shape: StepShape) -> tuple[float, ...]:
        features = (1.0, *map(float, shape))
        if self._max_graph_rows is None:
            return features
        return *features, float(shape.num_rows > self._max_graph_rows)
