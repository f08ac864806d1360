"""Costs as a linear function of what they depend on, fitted online.

Least squares over *relative* errors, older observations counting less: one that took a thousand
times as long as expected weighs no more than any other. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence

MEMORY = 0.99
"""What each further observation leaves of an observation's weight: 0.99 forgets half in 69."""
STIFFNESS = 1e-7
"""Pull towards the last estimate, by the weight of the data: decides only where these don't."""
LEAST_WEIGHT = 1e-6
"""Of a coefficient's data; when forgetting leaves less, its last estimate stands."""
NUM_EAGER_FITS = 64
FIT_INTERVAL = 8
"""One more changes little once so many are known; fitting costs more than taking note."""


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
