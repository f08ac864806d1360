"""One attempt at a line of a batch, as the parts that serve its request see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..inference.held_charge import HeldCharge

LINE = "batch_line"
"""The name of the line in the state of its request. No client can set it."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Whose request it is, and where its charge waits for its result."""

    key_id: str
    held: HeldCharge = field(default_factory=HeldCharge)
