"""Reads a configuration's rotary embedding settings, one for all layers or one per layer type."""

from __future__ import annotations

from typing import Any


def batch_wide_limit(config: Any) -> int | None:
    """The longest sequence whose rotary frequencies do not depend on its batch.

    longrope and dynamic ropes choose their frequencies by the longest sequence of the batch: beyond
    the original context, sequences would change each other's outputs. None: no rope does this.
    """
    longest = int(getattr(config, "max_position_embeddings", 0) or 0)
    limits = [
        int(part.get("original_max_position_embeddings") or longest)
        for part in _parts(getattr(config, "rope_parameters", None) or {})
        if _is_batch_wide(str(part.get("rope_type", "default")))
    ]
    return min(limits, default=None)


def _parts(rope: dict[str, Any]) -> list[dict[str, Any]]:
    return [rope, *(part for part in rope.values() if isinstance(part, dict))]


def _is_batch_wide(rope_type: str) -> bool:
    return rope_type == "longrope" or "dynamic" in rope_type
