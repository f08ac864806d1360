"""What a base drafts with, by the engine's configuration."""

from __future__ import annotations

from ..config import EngineConfig
from .base_model import BaseModel
from .drafting_part import DraftingPart
from .layer_subset import drafting_layers, open_subset
from .rounded_linears import RoundedLinears, rounded_format


def open_drafting_parts(config: EngineConfig, base: BaseModel) -> dict[str, DraftingPart]:
    """By their names. Raises InvalidParameter or UnsupportedModel."""
    names = drafting_layers(config, base.config.num_hidden_layers)
    parts: list[DraftingPart] = [open_subset(name, config, base) for name in names]
    if rounded_format(config) is not None:
        parts.append(RoundedLinears(base))
    return {part.name: part for part in parts}
