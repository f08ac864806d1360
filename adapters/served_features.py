"""The published features that an adapter uses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from .arrangement import Region
from .block import ExtraKind
from .bound import Binding, BoundSlice
from .errors import AdapterRejected
from .formats import SERVED, refusal_message
from .invocation import FIELD
from .layout import BaseLayout, SliceKind
from .peft_config import PeftConfig
from .peft_fields import field_pointer

_ACTIVATED = frozenset(
    {
        *("activated_lora", "lora", "rslora", "rank_pattern", "alpha_pattern", "initialization"),
        "output_head",
    }
)
"""What may go with an invocation. The others act on all tokens, in PEFT or by their nature."""
_OF_AUXILIARY = {
    ExtraKind.MAGNITUDE: "dora",
    ExtraKind.LORA_BIAS: "lora_bias",
    ExtraKind.BIAS: "bias",
    ExtraKind.MATRIX: "full_matrix",
    ExtraKind.TOKEN_ROWS: "token_rows",
    ExtraKind.CLASSIFICATION_HEAD: "classification",
    ExtraKind.DRAFT_HEAD: "draft_head",
}


_SUMMABLE = frozenset(feature.name for feature in SERVED) - {
    *_OF_AUXILIARY.values(),
    "added_tokens",
}


def are_summable(features: Iterable[str]) -> bool:
    """Whether an adapter with these features has A and B only, which add to another adapter's."""
    return _SUMMABLE.issuperset(features)


def features_of(binding: Binding, config: PeftConfig, layout: BaseLayout) -> tuple[str, ...]:
    """Names of rows of `formats.SERVED`, in their order."""
    found = {name for part in binding.slices for name in _of_slice(part, layout)}
    found.update(_OF_AUXILIARY[part.extra.kind] for part in binding.auxiliary)
    found.update(_of_config(config))
    if binding.vocab_size is not None or config.added_tokens:
        found.add("added_tokens")
    return tuple(feature.name for feature in SERVED if feature.name in found)


def check_activated(features: Collection[str]) -> None:
    """Raise AdapterRejected for an activated LoRA with features that act on all tokens."""
    others = sorted(set(features) - _ACTIVATED)
    if "activated_lora" in features and others:
        raise AdapterRejected(
            "unsupported_feature",
            f"{FIELD} with {', '.join(others)} is not supported: "
            f"{refusal_message('activated_extras')}",
            pointer=field_pointer(FIELD),
        )


def _of_slice(part: BoundSlice, layout: BaseLayout) -> set[str]:
    if part.layer.kind is SliceKind.EXPERTS:
        return {_of_experts(matrix.arrangement.region) for matrix in part.matrices}
    if part.layer.kind is SliceKind.EMBEDDING:
        return {"embedding"}
    if part.index == layout.output_head:
        return {"output_head"}
    return {"router" if part.index in layout.routers else "lora"}


def _of_experts(region: Region | None) -> str:
    if region is None:
        return "experts"
    return "stacked_experts" if region.expert is None else "separate_experts"


def _of_config(config: PeftConfig) -> Iterator[str]:
    if config.uses_rslora:
        yield "rslora"
    if config.rank_pattern:
        yield "rank_pattern"
    if config.alpha_pattern:
        yield "alpha_pattern"
    if config.invocation:
        yield "activated_lora"
    if config.initialization is not None:
        yield "initialization"
    if config.ensures_weight_tying:
        yield "tied_adapters"
