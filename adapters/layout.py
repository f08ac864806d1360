"""The base model's layers that an adapter can change, in the order in which the base runs them.

The engine derives the layout from the loaded model, intake binds tensors to it, and the canonical
block and the device table follow its order. Plain data, torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from functools import cached_property


class SliceKind(StrEnum):
    """The operation of a slice, which determines the layout of its matrices in a block."""

    LINEAR = "linear"
    """`y = x Wᵀ`: A `[rank, in]`, B transposed `[rank, out]`. Also for output heads and routers."""
    EMBEDDING = "embedding"
    """`y = W[token]`, in_features is the vocabulary: A transposed `[in, rank]`, so that a token's
    values are adjacent; B transposed `[rank, out]`."""
    EXPERTS = "experts"
    """One linear layer per expert: A `[experts, rank, in]`, B transposed `[experts, rank, out]`."""


class Halves(StrEnum):
    """The places of gate and up among the outputs of experts that compute both in one matrix."""

    NONE = ""
    """They compute one of them, or something else."""
    JOINED = "joined"
    """First the outputs of gate, then those of up."""
    INTERLEAVED = "interleaved"
    """One of gate, one of up, and so on."""


@dataclass(frozen=True)
class Slice:
    """One layer that LoRA may target; one slice of a projection."""

    name: str
    """Path inside the model, such as `model.layers.0.self_attn.q_proj`: the module's, or that of
    the parameter for experts (`model.layers.0.mlp.experts.down_proj`)."""
    in_features: int
    out_features: int
    kind: SliceKind = SliceKind.LINEAR
    num_experts: int = 1
    """For a slice of kind EXPERTS."""
    is_turned: bool = False
    """Of experts whose class stores `[experts, in, out]` without saying so (Llama 4): PEFT takes
    their inputs for outputs, so its A is what is multiplied last."""
    halves: Halves = Halves.NONE
    """For a slice of kind EXPERTS."""


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
    ties_embeddings: bool = False
    """The output head uses the input embedding's matrix."""
    digests: dict[str, list[str]] = field(default_factory=dict)
    """Module name of an embedding or head to hex SHA-256s of its weight as the checkpoint holds it,
    widened to float32, in row order: of all rows, then of all but the last, and so on. They tell an
    adapter's copy of it, which may have fewer rows, from a trained matrix."""
    fixed_vocabulary: str = ""
    """Why adapters cannot add tokens; empty: they can."""
    is_text_part: bool = False
    """The base is the text part of a composite checkpoint: adapters of the whole model name its
    modules with `language_model`."""

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """All slices; a slice's position in this tuple is its *slice index* everywhere."""
        return tuple(part for projection in self.projections for part in projection.slices)

    @cached_property
    def slice_index(self) -> dict[str, int]:
        return {part.name: index for index, part in enumerate(self.slices)}

    @cached_property
    def embedding(self) -> int | None:
        """Slice index of the input embedding, if adapters can change it."""
        is_first = bool(self.slices) and self.slices[0].kind is SliceKind.EMBEDDING
        return 0 if is_first else None

    @cached_property
    def output_head(self) -> int | None:
        """Slice index of the output head, if adapters can change it: the last one, as wide as the
        vocabulary."""
        if self.embedding is None or len(self.slices) < 2:
            return None
        last, vocabulary = self.slices[-1], self.slices[self.embedding].in_features
        is_head = last.kind is SliceKind.LINEAR and last.out_features == vocabulary
        return len(self.slices) - 1 if is_head else None

    def num_rows(self, end: str) -> int:
        """The rows of the matrix of the input embedding or the output head: its tokens."""
        layer = self.slices[self.slice_index[end]]
        is_embedding = layer.kind is SliceKind.EMBEDDING
        return layer.in_features if is_embedding else layer.out_features

    @cached_property
    def expert_modules(self) -> dict[str, tuple[int, ...]]:
        """Module that holds stacked experts to the slice indices of its parameters."""
        modules: dict[str, tuple[int, ...]] = {}
        for index, part in enumerate(self.slices):
            if part.kind is SliceKind.EXPERTS:
                module = part.name.rpartition(".")[0]
                modules[module] = (*modules.get(module, ()), index)
        return modules

    @cached_property
    def experts_of_layer(self) -> dict[str, str]:
        """Path of a decoder layer to the module of its stacked experts, if it has just one."""
        modules: dict[str, list[str]] = {}
        for module in self.expert_modules:
            modules.setdefault(layer_path(module), []).append(module)
        return {layer: names[0] for layer, names in modules.items() if len(names) == 1}

    @cached_property
    def routers(self) -> frozenset[int]:
        """Slice indices of the routers: the linear layers that score stacked experts."""
        num_experts = {
            module.rpartition(".")[0]: self.slices[indices[0]].num_experts
            for module, indices in self.expert_modules.items()
        }
        return frozenset(
            index
            for index, part in enumerate(self.slices)
            if part.kind is SliceKind.LINEAR
            and any(
                part.out_features == count and _is_router_name(part.name, block)
                for block, count in num_experts.items()
            )
        )

    def projection_ranges(self) -> Iterator[tuple[Projection, range]]:
        """Each projection with the range of its slice indices."""
        start = 0
        for projection in self.projections:
            yield projection, range(start, start + len(projection.slices))
            start += len(projection.slices)


def layer_path(module: str) -> str:
    """The path of the decoder layer that holds a module, up to its number; empty outside of one.

    `model.layers.3` for `model.layers.3.mlp.experts`.
    """
    parts = module.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _is_router_name(name: str, block: str) -> bool:
    inside = name.removeprefix(f"{block}.")
    return inside != name and ("gate" in inside or "router" in inside)


def layout_to_json(layout: BaseLayout) -> str:
    """Encode a layout for another process."""
    projections = [
        [list(astuple(part)) for part in projection.slices] for projection in layout.projections
    ]
    fields = {
        "base_id": layout.base_id,
        "projections": projections,
        "refused": layout.refused,
        "ties_embeddings": layout.ties_embeddings,
        "digests": layout.digests,
        "is_text_part": layout.is_text_part,
        "fixed_vocabulary": layout.fixed_vocabulary,
    }
    return json.dumps(fields, separators=(",", ":"))


def layout_from_json(text: str) -> BaseLayout:
    """Decode what `layout_to_json` wrote."""
    fields = json.loads(text)
    projections = tuple(
        Projection(tuple(_slice_from_json(part) for part in projection))
        for projection in fields["projections"]
    )
    return BaseLayout(
        fields["base_id"],
        projections,
        fields["refused"],
        ties_embeddings=fields["ties_embeddings"],
        digests=fields["digests"],
        is_text_part=fields.get("is_text_part", False),
        fixed_vocabulary=fields.get("fixed_vocabulary", ""),
    )


def _slice_from_json(part: list[str | int]) -> Slice:
    name, in_features, out_features, kind, num_experts, *rest = part
    return Slice(
        str(name),
        int(in_features),
        int(out_features),
        SliceKind(str(kind)),
        int(num_experts),
        is_turned=rest[:1] == [True],
        halves=Halves(str(rest[1])) if len(rest) > 1 else Halves.NONE,
    )
