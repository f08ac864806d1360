"""Every tensor of an adapter, bound to a slice of the base. What does not bind is refused.

PEFT names a matrix `base_model.model.<module>.lora_A.weight`, and `<module>` is a slice's name.
Whether an adapter belongs to this base is decided here, by names and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import AdapterRejected
from .layout import BaseLayout
from .peft_config import MAX_RANK, PeftConfig
from .safetensors_header import TensorEntry

_PREFIX = "base_model.model."
_A_SUFFIX = ".lora_A.weight"
_B_SUFFIX = ".lora_B.weight"
_UNSUPPORTED_PARTS: Mapping[str, str] = {
    ".lora_magnitude_vector": "DoRA is not served; train without use_dora",
    ".lora_embedding_": "LoRA on embeddings is not served; leave them out of target_modules",
    ".lora_A.bias": "a bias on lora_A is not served",
    ".lora_B.bias": "a bias on lora_B is not served; train with lora_bias=False",
    ".modules_to_save": "whole trained modules are not served; train without modules_to_save",
    ".trainable_tokens": "trained token embeddings are not served",
    ".token_adapter": "trained token embeddings are not served",
    ".base_layer.": "a copy of the base's own weights is not served; save with "
    "save_embedding_layers=False",
    ".experts.lora_": "LoRA on bare parameters (MoE experts) is not served",
    ".lora_velora_embed": "VeLoRA checkpoints are not served",
    ".lora_diag": "KaSA is not served",
}


@dataclass(frozen=True, slots=True)
class BoundSlice:
    """The two matrices of one slice."""

    index: int
    """Slice index in the layout."""
    module: str
    a: TensorEntry
    """`[rank, in_features]`"""
    b: TensorEntry
    """`[out_features, rank]`"""
    rank: int
    scale: float
    """Factor of B·A: alpha ÷ rank, or alpha ÷ √rank."""


def bind(
    tensors: Mapping[str, TensorEntry], config: PeftConfig, layout: BaseLayout
) -> list[BoundSlice]:
    """Bind all tensors; return the touched slices in the layout's order.

    Raises AdapterRejected naming the first tensor that does not bind.
    """
    downs: dict[str, TensorEntry] = {}
    ups: dict[str, TensorEntry] = {}
    for name, tensor in tensors.items():
        module, matrices = (
            (_module(name, _A_SUFFIX), downs)
            if name.endswith(_A_SUFFIX)
            else (_module(name, _B_SUFFIX), ups)
        )
        _check_module(module, name, layout)
        matrices[module] = tensor
    _check_pairs(downs, ups)
    bound = [_bind_slice(module, a, ups[module], config, layout) for module, a in downs.items()]
    return sorted(bound, key=lambda part: part.index)


def _module(name: str, suffix: str) -> str:
    for part, explanation in _UNSUPPORTED_PARTS.items():
        if part in name:
            raise AdapterRejected("unsupported_feature", f"{name}: {explanation}", pointer=name)
    if not (name.startswith(_PREFIX) and name.endswith(suffix)):
        raise AdapterRejected(
            "unbound_tensor",
            f"{name} is not named as PEFT names a LoRA matrix: {_PREFIX}<module>{_A_SUFFIX}",
            pointer=name,
        )
    return name[len(_PREFIX) : -len(suffix)]


def _check_module(module: str, name: str, layout: BaseLayout) -> None:
    if module in layout.refused:
        raise AdapterRejected(
            "unsupported_module", f"{module}: {layout.refused[module]}", pointer=name
        )
    if module not in layout.slice_index:
        raise AdapterRejected(
            "wrong_base", f"this base has no linear layer named {module}", pointer=name
        )


def _check_pairs(downs: Mapping[str, TensorEntry], ups: Mapping[str, TensorEntry]) -> None:
    for module in downs.keys() ^ ups.keys():
        have, missing = ("lora_A", "lora_B") if module in downs else ("lora_B", "lora_A")
        raise AdapterRejected(
            "missing_pair", f"{module} has {have} but not {missing}", pointer=module
        )


def _bind_slice(
    module: str, a: TensorEntry, b: TensorEntry, config: PeftConfig, layout: BaseLayout
) -> BoundSlice:
    index = layout.slice_index[module]
    part = layout.slices[index]
    rank = a.shape[0] if a.shape else 0
    if rank > MAX_RANK:
        raise AdapterRejected(
            "rank_too_large", f"{a.name} has rank {rank}; the most is {MAX_RANK}", pointer=a.name
        )
    _check_shape(a, (rank, part.in_features))
    _check_shape(b, (part.out_features, rank))
    if rank != config.rank_of(module):
        raise AdapterRejected(
            "rank_mismatch",
            f"{a.name} has rank {rank}, its configuration says {config.rank_of(module)}",
            pointer=a.name,
        )
    return BoundSlice(index, module, a, b, rank, config.scale_of(module))


def _check_shape(tensor: TensorEntry, expected: tuple[int, int]) -> None:
    if tensor.shape != expected:
        raise AdapterRejected(
            "shape_mismatch",
            f"{tensor.name} is {list(tensor.shape)} where this base needs {list(expected)}",
            pointer=tensor.name,
        )
