"""Which linear layers of a base model an adapter can change, in the order the base runs them.

The engine derives the layout from the loaded model; intake binds tensors to it; the canonical
block and the device tables follow its order. It is plain data and needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Slice:
    """One linear layer that LoRA may target; one part of a fused projection."""

    name: str
    """Module path inside the model, such as `model.layers.0.self_attn.q_proj`: PEFT's name."""
    in_features: int
    out_features: int


@dataclass(frozen=True)
class Projection:
    """Slices that read the same input and are computed by one matmul (q, k, v; gate, up)."""

    slices: tuple[Slice, ...]

    @property
    def in_features(self) -> int:
        return self.slices[0].in_features

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.slices)


@dataclass(frozen=True)
class BaseLayout:
    """Every projection of one base model, in execution order."""

    base_id: str
    projections: tuple[Projection, ...]
    refused: dict[str, str] = field(default_factory=dict)
    """Modules that exist but cannot carry LoRA here, with the reason: `{"lm_head": "..."}`."""

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """All slices; a slice's position in this tuple is its *slice index* everywhere."""
        return tuple(part for projection in self.projections for part in projection.slices)

    @cached_property
    def slice_index(self) -> dict[str, int]:
        return {part.name: index for index, part in enumerate(self.slices)}

    def projection_ranges(self) -> Iterator[tuple[Projection, range]]:
        """Each projection with the range of its slice indices."""
        start = 0
        for projection in self.projections:
            yield projection, range(start, start + len(projection.slices))
            start += len(projection.slices)


def layout_to_json(layout: BaseLayout) -> str:
    """Encode a layout for another process."""
    projections = [
        [[part.name, part.in_features, part.out_features] for part in projection.slices]
        for projection in layout.projections
    ]
    fields = {"base_id": layout.base_id, "projections": projections, "refused": layout.refused}
    return json.dumps(fields, separators=(",", ":"))


def layout_from_json(text: str) -> BaseLayout:
    """Decode what `layout_to_json` wrote."""
    fields = json.loads(text)
    projections = tuple(
        Projection(tuple(Slice(*part) for part in projection))
        for projection in fields["projections"]
    )
    return BaseLayout(fields["base_id"], projections, fields["refused"])
