"""Binds every tensor of an adapter to a slice of the base, and refuses tensors that do not fit.

PEFT names a matrix `base_model.model.<module>.lora_A.weight`, and `<module>` is a slice's name.
Names and shapes decide whether an adapter belongs to this base.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from .arrangement import Arrangement, Order
from .auxiliary_binding import bind_auxiliary
from .bound import Binding, BoundMatrix, BoundSlice
from .errors import AdapterRejected
from .expert_binding import bind_experts
from .expert_names import current_name, find_expert_matrix
from .expert_parts import ExpertTensor, bind_expert_parts
from .formats import refusal_message
from .layout import BaseLayout, SliceKind
from .peft_config import MAX_RANK, PeftConfig
from .resized_ends import check_ends_agree, check_not_resized, take_apart
from .safetensors_header import TensorEntry
from .tensor_names import TensorName, TensorRole, parse_tensor_name
from .whole_model_names import own_name, with_own_names

_A_ROLES = (TensorRole.A, TensorRole.EMBEDDING_A)
_B_ROLES = (TensorRole.B, TensorRole.EMBEDDING_B)


class _Pair(NamedTuple):
    """A and B of one module, or of one of the wrappers around stacked experts."""

    name: TensorName
    """The name of A."""
    a: TensorEntry
    b: TensorEntry


def bind(tensors: Mapping[str, TensorEntry], config: PeftConfig, layout: BaseLayout) -> Binding:
    """Bind all tensors; the touched slices come in the layout's order.

    Raises AdapterRejected naming the first tensor that does not bind.
    """
    named = [(parse_tensor_name(name), tensor) for name, tensor in tensors.items()]
    if layout.is_text_part:
        config = with_own_names(config)
        named = list(_with_own_names(named))
    of_lora = [(name, tensor) for name, tensor in named if name.role in _A_ROLES + _B_ROLES]
    experts, modules = _split(of_lora, layout)
    for name, tensor in modules:
        _check_module(name, tensor, layout)
    slices = sorted(
        [
            *_bind_pairs(_pairs(modules), config, layout),
            *bind_expert_parts(experts, config, layout),
        ],
        key=lambda part: part.index,
    )
    _check_distinct(slices)
    others = [(name, tensor) for name, tensor in named if name.role not in _A_ROLES + _B_ROLES]
    ends = take_apart(others, config, layout)
    auxiliary, copies = bind_auxiliary(ends.named, slices, ends.config, layout)
    vocab_size = check_ends_agree(auxiliary, layout)
    tokens = ends.config.trained_tokens
    added_rows = () if tokens == config.trained_tokens else tokens
    return Binding(tuple(slices), auxiliary, copies, ends.twins, added_rows, vocab_size)


def _with_own_names(
    named: Iterable[tuple[TensorName, TensorEntry]],
) -> Iterator[tuple[TensorName, TensorEntry]]:
    """The tensors under the names of the text part. Raises AdapterRejected if two get one name."""
    seen: set[TensorName] = set()
    for name, tensor in named:
        own = name._replace(module=own_name(name.module))
        if own in seen:
            raise AdapterRejected(
                "unbound_tensor",
                f"{tensor.name}: another tensor of the adapter names the same matrix",
                pointer=tensor.name,
            )
        seen.add(own)
        yield own, tensor


def _split(
    tensors: Iterable[tuple[TensorName, TensorEntry]], layout: BaseLayout
) -> tuple[list[ExpertTensor], list[tuple[TensorName, TensorEntry]]]:
    """The tensors that are parts of experts' matrices, and those that are named after modules."""
    experts: list[ExpertTensor] = []
    modules: list[tuple[TensorName, TensorEntry]] = []
    for name, tensor in tensors:
        is_matrix = name.role in (TensorRole.A, TensorRole.B) and not name.num_wrappers
        matrix = find_expert_matrix(name.module, layout) if is_matrix else None
        if matrix is None:
            modules.append((name, tensor))
        else:
            experts.append(ExpertTensor(name, tensor, matrix))
    return experts, modules


def _check_distinct(slices: Iterable[BoundSlice]) -> None:
    """`slices` are sorted."""
    for one, other in pairwise(slices):
        if one.index == other.index:
            name = other.a[0].tensor.name
            raise AdapterRejected(
                "config_contradiction",
                f"{name} changes {other.module}, which other tensors change",
                pointer=name,
            )


def _check_module(name: TensorName, tensor: TensorEntry, layout: BaseLayout) -> None:
    """Whether this base has the module, and whether its kind takes such a matrix."""
    module = current_name(name.module, layout)
    if module in layout.refused:
        raise AdapterRejected(
            "unsupported_module", f"{module}: {layout.refused[module]}", pointer=tensor.name
        )
    if module in layout.expert_modules and name.role in (TensorRole.A, TensorRole.B):
        return
    if module not in layout.slice_index:
        if layout.is_text_part and not module.startswith(("model.layers.", "lm_head")):
            raise AdapterRejected(
                "unsupported_module",
                f"{module}: {refusal_message('other_part')}",
                pointer=tensor.name,
            )
        raise AdapterRejected(
            "wrong_base", f"this base has no linear layer named {module}", pointer=tensor.name
        )
    is_embedding = layout.slices[layout.slice_index[module]].kind is SliceKind.EMBEDDING
    has_embedding_role = name.role in (TensorRole.EMBEDDING_A, TensorRole.EMBEDDING_B)
    if is_embedding != has_embedding_role or name.num_wrappers:
        raise AdapterRejected(
            "unbound_tensor",
            f"{tensor.name} is not how PEFT names a matrix of this layer",
            pointer=tensor.name,
        )


def _pairs(tensors: Iterable[tuple[TensorName, TensorEntry]]) -> list[_Pair]:
    downs: dict[tuple[str, int], tuple[TensorName, TensorEntry]] = {}
    ups: dict[tuple[str, int], TensorEntry] = {}
    for name, tensor in tensors:
        if name.role in _A_ROLES:
            downs[name.module, name.num_wrappers] = name, tensor
        else:
            ups[name.module, name.num_wrappers] = tensor
    for module, num_wrappers in sorted(downs.keys() ^ ups.keys()):
        is_down = (module, num_wrappers) in downs
        have, missing = ("lora_A", "lora_B") if is_down else ("lora_B", "lora_A")
        raise AdapterRejected(
            "missing_pair", f"{module} has {have} but not {missing}", pointer=module
        )
    return [_Pair(name, tensor, ups[key]) for key, (name, tensor) in downs.items()]


def _bind_pairs(
    pairs: Iterable[_Pair], config: PeftConfig, layout: BaseLayout
) -> Iterator[BoundSlice]:
    of_experts: dict[str, dict[int, tuple[TensorEntry, TensorEntry]]] = {}
    for name, a, b in pairs:
        module = current_name(name.module, layout)
        if module in layout.slice_index:
            yield _bind_slice(layout.slice_index[module], name.module, a, b, config, layout)
        else:
            of_experts.setdefault(module, {})[name.num_wrappers] = a, b
    for module, levels in of_experts.items():
        yield from bind_experts(module, levels, config, layout)


def _bind_slice(
    index: int,
    module: str,
    a: TensorEntry,
    b: TensorEntry,
    config: PeftConfig,
    layout: BaseLayout,
) -> BoundSlice:
    """`module`: the slice's name in the adapter."""
    layer = layout.slices[index]
    parameter = f"{module}.weight"
    is_parameter = config.targets_parameter(parameter)
    if is_parameter and index not in layout.routers:
        raise AdapterRejected(
            "unsupported_feature",
            f"{parameter}: {refusal_message('parameter_of_a_linear_layer')}",
            pointer=a.name,
        )
    rank = a.shape[0] if a.shape else 0
    if rank > MAX_RANK:
        raise AdapterRejected(
            "rank_too_large", f"{a.name} has rank {rank}; the most is {MAX_RANK}", pointer=a.name
        )
    if index == layout.embedding:
        check_not_resized(a, (rank, layer.in_features), 1)
    elif index == layout.output_head:
        check_not_resized(b, (layer.out_features, rank), 0)
    _check_shape(a, (rank, layer.in_features))
    _check_shape(b, (layer.out_features, rank))
    path = parameter if is_parameter else module  # PEFT matches its patterns with this
    if rank != config.rank_of(path):
        raise AdapterRejected(
            "rank_mismatch",
            f"{a.name} has rank {rank}, its configuration says {config.rank_of(path)}",
            pointer=a.name,
        )
    scale = config.scale_of(path)
    is_embedding = layer.kind is SliceKind.EMBEDDING
    down = Arrangement(Order.TRANSPOSED if is_embedding else Order.AS_STORED)
    up = Arrangement(Order.TRANSPOSED)
    return BoundSlice(
        index,
        layer,
        (BoundMatrix(a, down),),
        (BoundMatrix(b, up, scale),),
        rank,
        scale,
        is_parameter=is_parameter,
    )


def _check_shape(tensor: TensorEntry, expected: tuple[int, int]) -> None:
    if tensor.shape != expected:
        raise AdapterRejected(
            "shape_mismatch",
            f"{tensor.name} is {list(tensor.shape)} where this base needs {list(expected)}",
            pointer=tensor.name,
        )
