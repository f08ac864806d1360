"""What a base drafts with, by the engine's configuration."""

from __future__ import annotations

from ..config import EngineConfig
from .base_model import BaseModel
from .drafting_part import DraftingPart
from .first_layers import exit_argument, open_first_layers
from .rounded_linears import RoundedLinears, rounded_format


def open_drafting_parts(config: EngineConfig, base: BaseModel) -> dict[str, DraftingPart]:
    """By their names. Raises InvalidParameter or UnsupportedModel."""
    parts: list[DraftingPart] = []
    argument = exit_argument(config)
    if argument is not None:
        parts.append(open_first_layers(argument, base))
    if rounded_format(config) is not None:
        parts.append(RoundedLinears(base))
    return {part.name: part for part in parts}
