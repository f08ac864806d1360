"""Reads a configuration's rotary embedding settings, one for all layers or one per layer type.

transformers chooses the frequencies of a longrope or dynamic rope by the length of the longest
sequence of a batch. Here each request has its own, by the greatest length that it can reach: those
of the first *rotary context* that holds this length. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RotaryContexts:
    """The rotary contexts of a base, which are lengths in tokens.

    The tables of cosines and sines have a row for each position of each context, one context after
    another.
    """

    lengths: tuple[int, ...]
    """Ascending; the last is that of the longest sequence."""

    def start(self, num_tokens: int) -> int:
        """The first row of a request that reaches at most so many tokens."""
        return sum(self.lengths[: bisect_left(self.lengths[:-1], num_tokens)])

    @property
    def has_tables(self) -> bool:
        """Whether there is a choice; if not, each rotary embedding keeps its own frequencies."""
        return len(self.lengths) > 1

    def __str__(self) -> str:
        """For the operator."""
        *shorter, longest = (f"{length:,}" for length in self.lengths)
        return (
            f"Requests of up to {' and '.join(shorter)} tokens, prompt and max_tokens together, "
            f"get the rotary frequencies of that length; longer ones get those of {longest}."
        )


def rotary_contexts(config: Any, *, max_model_len: int) -> RotaryContexts:
    """The lengths up to `max_model_len` at which a rope's frequencies change, and that one."""
    longest = _max_position(config)
    borders = {
        longest
        if "dynamic" in part["rope_type"]
        else int(part.get("original_max_position_embeddings") or longest)
        for part in _parts(config)
    }
    shorter = sorted(length for length in borders if length < max_model_len)
    return RotaryContexts((*shorter, max_model_len))


def full_context(config: Any) -> int:
    """The longest sequence that the configuration is made for: a dynamic rope stretches that of the
    weights by its factor."""
    factors = [
        float(part.get("factor") or 1.0)
        for part in _parts(config)
        if "dynamic" in part["rope_type"]
    ]
    return int((_max_position(config) or 2048) * max([1.0, *factors]))


def depends_on_length(rope_type: object) -> bool:
    """Whether the frequencies of this type of rope depend on the length of the sequence."""
    return isinstance(rope_type, str) and (rope_type == "longrope" or "dynamic" in rope_type)


def _max_position(config: Any) -> int:
    return int(getattr(config, "max_position_embeddings", 0) or 0)


def _parts(config: Any) -> list[dict[str, Any]]:
    """The settings of the ropes that depend on the length."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    # HunYuan's `alpha` fixes the frequencies of what its checkpoints call dynamic.
    return [
        part for part in parts if depends_on_length(part.get("rope_type")) and not part.get("alpha")
    ]
