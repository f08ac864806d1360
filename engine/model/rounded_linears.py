"""A base that multiplies by its weights rounded to fewer bits, for its own drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ...kernels.linear import Linear
from ...kernels.quantize import WeightFormat
from ..config import EngineConfig, source_of
from ..errors import InvalidParameter
from .base_model import BaseModel
from .linear import FusedProjection

QUANTIZED = "quantized"
"""The source of proposers that draft with them: see `config.source_of`."""


def rounded_format(config: EngineConfig) -> WeightFormat | None:
    """The format of the rounded copy; None: no proposer of the configuration needs one. Raises
    InvalidParameter if it is not one."""
    entries = (entry.partition(":") for entry in config.speculation)
    found = (argument for name, _, argument in entries if source_of(name) == QUANTIZED)
    argument = next(found, None)
    if argument is None:
        return None
    if argument not in list(WeightFormat):
        known = ", ".join(WeightFormat)
        raise InvalidParameter("speculation", f"{QUANTIZED} takes one of {known}")
    return WeightFormat(argument)


class RoundedLinears:
    """Lets a base multiply by its rounded linear layers, experts and head, and restores it."""

    name = QUANTIZED

    def __init__(self, base: BaseModel) -> None:
        """`base`: loaded with rounded linear layers and experts."""
        self._base = base
        self._linears: list[tuple[FusedProjection, Linear, Linear]] = [
            (projection, projection.linear, projection.rounded)
            for projection in base.projections
            if projection.rounded is not None
        ]
        self._experts = [part for layer in base.moe_layers for part in layer.experts]

    @contextmanager
    def only(self) -> Iterator[None]:
        """The model's forwards inside multiply by the rounded weights, with the same adapters."""
        head, rounded_head = self._base.ends.head, self._base.rounded_head
        with ExitStack() as stack:
            if head is not None and rounded_head is not None:
                stack.enter_context(head.replaced_by(rounded_head, self._base.model))
            stack.callback(self._restore)
            for projection, _, rounded in self._linears:
                projection.linear = rounded
            for part in self._experts:
                part.multiplies_rounded = True
            yield

    def _restore(self) -> None:
        for projection, served, _ in self._linears:
            projection.linear = served
        for part in self._experts:
            part.multiplies_rounded = False
