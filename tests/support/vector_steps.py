"""One step's op on adapters' vectors, with adapters that hold different ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from loraplex.kernels.lora_vectors import plain_apply_vectors

from .lora_weights import PoisonedWeights, make_layout

MAGNITUDE, BIAS, LORA_BIAS = range(3)
HELD: tuple[dict[int, tuple[int, ...]], ...] = (
    {0: (MAGNITUDE,), 1: (MAGNITUDE,), 2: (MAGNITUDE,)},
    {1: (BIAS,)},
    {0: (LORA_BIAS,), 2: (BIAS, LORA_BIAS)},
    {0: (MAGNITUDE, BIAS), 1: (MAGNITUDE, BIAS, LORA_BIAS)},
    {},
)
"""For each row its vectors: by slice, their kinds."""


class VectorStep:
    """The base's result of one projection of slices 1.. of a base, and the adapters of its rows."""

    def __init__(
        self,
        rows: Sequence[int],
        *,
        outs: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        bias: torch.dtype | None = None,
        device: str = "cpu",
    ) -> None:
        """`outs`: up to three slices. `bias`: the type of the base's bias, if it has one."""
        layout = make_layout((8, (24,)), (8, outs))
        self.weights = PoisonedWeights(layout, num_rows=len(HELD), dtype=dtype, device=device)
        for row, slices in enumerate(HELD):
            for index, kinds in slices.items():
                if index < len(outs):
                    self.weights.put_vectors(row, 1 + index, kinds)
        self.rows = list(rows)
        self.columns = [slice(*ends) for ends in pairwise(accumulate(outs, initial=0))]
        self._token_rows = torch.tensor(self.rows, dtype=torch.int32, device=device)
        self._outs = outs
        self.y = torch.randn(len(self.rows), sum(outs)).to(device, dtype)
        self.bias = None if bias is None else torch.randn(sum(outs)).to(device, bias)

    def vectors(self, row: int, index: int) -> list[Tensor | None]:
        """Of one slice of the projection, in the order of their use."""
        if row < 0:
            return [None] * 3
        return [self.weights.vector(row, 1 + index, kind) for kind in range(3)]

    def apply(self, function: Callable[..., None], tokens: slice = slice(None)) -> Tensor:
        """What `function`, which takes the arguments of `apply_vectors`, makes of these tokens."""
        result = self.y[tokens].clone()
        function(
            result,
            self.weights,
            self._token_rows[tokens],
            self.bias,
            first_slice=1,
            slice_outs=self._outs,
        )
        return result

    def defined(self) -> Tensor:
        return self.apply(plain_apply_vectors)

    def changed_alone(self, function: Callable[..., None]) -> list[int]:
        """The tokens of which a bit changes where no other shares their step."""
        together = self.apply(function)
        tokens = [slice(token, token + 1) for token in range(len(self.rows))]
        return [
            own.start for own in tokens if not torch.equal(self.apply(function, own), together[own])
        ]
