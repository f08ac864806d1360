"""Sets of layers as an operator writes them: `3,5,8-10`, counted from 0 as in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .errors import InvalidParameter

MAX_DIGITS = 4


def parse_layers(text: str) -> tuple[int, ...]:
    """The layers in ascending order. Raises InvalidParameter for anything but numbers and ascending
    ranges, and for a layer that is named twice."""
    layers = [layer for part in text.split(",") for layer in _parsed(part.strip())]
    if len(set(layers)) < len(layers):
        raise InvalidParameter("speculation", f"{text} names a layer twice")
    return tuple(sorted(layers))


def _parsed(part: str) -> Sequence[int]:
    first, dash, last = part.partition("-")
    ends = (first, last) if dash else (first, first)
    if all(end.isdecimal() and len(end) <= MAX_DIGITS for end in ends):
        layers = range(int(ends[0]), int(ends[1]) + 1)
        if layers:
            return layers
    raise InvalidParameter("speculation", f"{part!r} is neither a layer nor a range such as 8-10")


def layers_text(layers: Iterable[int]) -> str:
    """The text that `parse_layers` reads as these layers; ranges for neighbours."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
