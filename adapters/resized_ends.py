"""Takes the matrices of a resized embedding and output head apart, before they are bound.

PEFT saves both whole when their vocabulary is not the base's. Of a matrix that was not trained, the
rows that the base has are a copy of the base's, and those beyond are rows of added tokens, bound as
if `trainable_token_indices` had named them: the adapter that is restored from the block names them
so. A matrix of `modules_to_save` stays whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from .added_tokens import MAX_ADDED_TOKENS
from .block import Extra, ExtraKind
from .bound import BoundExtra, TwinTensor
from .errors import AdapterRejected
from .formats import refusal_message
from .layout import BaseLayout
from .peft_config import PeftConfig
from .safetensors_header import TensorEntry
from .tensor_names import PREFIX, TensorName, TensorRole

_COPIES = (TensorRole.BASE_COPY, TensorRole.ROWS_BASE)


class ResizedEnds(NamedTuple):
    """An adapter's tensors without what `bind_auxiliary` cannot bind."""

    named: list[tuple[TensorName, TensorEntry]]
    config: PeftConfig
    twins: tuple[TwinTensor, ...]


def take_apart(
    named: Iterable[tuple[TensorName, TensorEntry]], config: PeftConfig, layout: BaseLayout
) -> ResizedEnds:
    """The tensors that are no A or B, for `bind_auxiliary`. Raises AdapterRejected."""
    named = list(named)
    left_out, twins = _find_left_out(dict(named), config, layout)
    kept: list[tuple[TensorName, TensorEntry]] = []
    added: dict[str, tuple[int, ...]] = {}
    for name, tensor in named:
        if name in left_out:
            continue
        num_rows = _num_base_rows(name, tensor, config, layout)
        if num_rows is None:
            kept.append((name, tensor))
            continue
        kept.append((name, _rows(tensor, 0, num_rows)))
        ids = tuple(range(num_rows, tensor.shape[0]))
        own = _trained_tokens(name.module, config, layout)
        if not own:
            rows = _rows(tensor, num_rows, tensor.shape[0])
            delta = TensorName(name.module, TensorRole.TOKEN_ROWS, 0)
            kept.append((delta, replace(rows, name=f"{PREFIX}{name.module}.{delta.role}")))
            added[name.module] = ids
        elif not set(ids) <= set(own):
            raise _refused(tensor, "those that the base does not have are not all trained")
    return ResizedEnds(kept, _with_tokens(config, added, layout), twins)


def vocabulary_of(extras: Iterable[Extra], layout: BaseLayout, end: int | None) -> int | None:
    """The rows of one end with these extras; None where adapters cannot change it."""
    if end is None:
        return None
    size = layout.num_rows(layout.slices[end].name)
    for extra in extras:
        if extra.slice_index == end and extra.kind is ExtraKind.MATRIX:
            return extra.shape[0]
        if extra.slice_index == end and extra.kind is ExtraKind.TOKEN_ROWS:
            return max([size, *(token + 1 for token in extra.token_ids[-1:])])
    return size


def own_vocabulary(extras: Iterable[Extra], layout: BaseLayout) -> int | None:
    """The tokens of an adapter with these extras; None: as many as the base has."""
    size = vocabulary_of(extras, layout, layout.output_head)
    return None if size == vocabulary_of((), layout, layout.output_head) else size


def num_added_rows(extra: Extra, base: int) -> int:
    """How many of its last rows the base, which has so many tokens, does not have."""
    match extra.kind:
        case ExtraKind.MATRIX:
            return max(0, extra.shape[0] - base)
        case ExtraKind.TOKEN_ROWS:
            return len(extra.token_ids) - bisect_left(extra.token_ids, base)
    return 0


def check_ends_agree(auxiliary: Iterable[BoundExtra], layout: BaseLayout) -> int | None:
    """The adapter's vocabulary if it is not the base's. Raises AdapterRejected if the two ends have
    different ones, or the base cannot have another."""
    extras = [part.extra for part in auxiliary]
    base = vocabulary_of((), layout, layout.embedding)
    embedding = vocabulary_of(extras, layout, layout.embedding)
    head = vocabulary_of(extras, layout, layout.output_head)
    if embedding in (None, base) and head in (None, base):
        return None
    resized = next(part.tensor for part in auxiliary if _resizes(part.extra, base))
    if not all(_is_without_gap(extra, base) for extra in extras):
        raise _refused(resized, f"rows of some tokens from {base} on are missing")
    if layout.fixed_vocabulary:
        raise _refused(resized, layout.fixed_vocabulary)
    if head is None or embedding != head:
        raise _refused(resized, f"the embedding has {embedding} rows, the output head {head}")
    return head


def check_resized(tensor: TensorEntry, num_rows: int) -> None:
    """Raise AdapterRejected if the matrix of an end has far more or fewer rows than the base's,
    which has `num_rows`."""
    if abs(tensor.shape[0] - num_rows) > MAX_ADDED_TOKENS:
        raise _refused(tensor, f"the base has {num_rows}, and {MAX_ADDED_TOKENS} may be added")


def check_not_resized(tensor: TensorEntry, shape: tuple[int, int], dim: int) -> None:
    """Raise AdapterRejected if a matrix of LoRA fits but for `dim`, that of the vocabulary."""
    have = tensor.shape
    if len(have) == 2 and have[dim] != shape[dim] and have[1 - dim] == shape[1 - dim]:
        raise _refused(tensor, f"LoRA on a base with {shape[dim]} tokens")


def _find_left_out(
    found: Mapping[TensorName, TensorEntry], config: PeftConfig, layout: BaseLayout
) -> tuple[set[TensorName], tuple[TwinTensor, ...]]:
    """What PEFT saves a second time: trained matrices, and a tied head's trained rows; and the
    originals of trained matrices, which have no effect."""
    left_out, twins = set(), []
    for name, tensor in found.items():
        kept = name._replace(role=TensorRole.MATRIX)
        if name.role is TensorRole.TOKEN_ROWS:
            kept = _rows_of_tied_embedding(name, config, layout)
        elif name.role not in (TensorRole.ORIGINAL, TensorRole.SAVED):
            continue
        if kept in found and kept != name:
            left_out.add(name)
            if name.role is not TensorRole.ORIGINAL:
                twins.append(TwinTensor(found[kept], tensor))
    return left_out, tuple(twins)


def _rows_of_tied_embedding(name: TensorName, config: PeftConfig, layout: BaseLayout) -> TensorName:
    """The rows of which those of a tied head are a copy; `name` itself if they are none."""
    if not layout.ties_embeddings or layout.embedding is None or layout.output_head is None:
        return name
    is_head = name.module == layout.slices[layout.output_head].name
    if not is_head or config.tokens_of(name.module, is_input=False):
        return name
    return name._replace(module=layout.slices[layout.embedding].name)


def is_saved(index: int, config: PeftConfig, layout: BaseLayout) -> bool:
    """Whether `modules_to_save` names this slice, or PEFT tied it to one that it names."""
    if config.saves_module(layout.slices[index].name):
        return True
    ends = {layout.embedding, layout.output_head}
    is_tied = layout.ties_embeddings and config.ensures_weight_tying
    return (
        is_tied
        and index in ends
        and any(end is not None and config.saves_module(layout.slices[end].name) for end in ends)
    )


def _num_base_rows(
    name: TensorName, tensor: TensorEntry, config: PeftConfig, layout: BaseLayout
) -> int | None:
    """How many rows the base has, if this is the matrix of an end that was not trained and has
    more."""
    index = layout.slice_index.get(name.module)
    if index is None or index not in (layout.embedding, layout.output_head):
        return None
    is_matrix = name.role is TensorRole.MATRIX and not is_saved(index, config, layout)
    if not is_matrix and name.role not in _COPIES:
        return None
    layer, num_rows = layout.slices[index], layout.num_rows(name.module)
    width = layer.in_features + layer.out_features - num_rows
    if len(tensor.shape) != 2 or tensor.shape[1] != width or tensor.shape[0] <= num_rows:
        return None
    check_resized(tensor, num_rows)
    return num_rows


def _with_tokens(
    config: PeftConfig, added: Mapping[str, tuple[int, ...]], layout: BaseLayout
) -> PeftConfig:
    """The configuration with the rows of these modules named, as `trainable_token_indices` does."""
    if not added:
        return config
    assert layout.embedding is not None, "it has rows"
    embedding = layout.slices[layout.embedding].name
    named = {name or embedding: tokens for name, tokens in config.trained_tokens}
    return replace(config, trained_tokens=tuple({**named, **added}.items()))


def _trained_tokens(module: str, config: PeftConfig, layout: BaseLayout) -> tuple[int, ...]:
    """The tokens whose rows of this end were trained; of a tied head the embedding's, too."""
    is_input = layout.slice_index[module] == layout.embedding
    own = config.tokens_of(module, is_input=is_input)
    if own or is_input or not layout.ties_embeddings or layout.embedding is None:
        return own
    return config.tokens_of(layout.slices[layout.embedding].name, is_input=True)


def _rows(tensor: TensorEntry, start: int, stop: int) -> TensorEntry:
    """Some rows of a tensor, which are adjacent in the file."""
    row_bytes = tensor.num_bytes // tensor.shape[0]
    return replace(
        tensor,
        shape=(stop - start, *tensor.shape[1:]),
        offset=tensor.offset + start * row_bytes,
        num_bytes=(stop - start) * row_bytes,
    )


def _resizes(extra: Extra, base: int | None) -> bool:
    if base is None:
        return False
    if extra.kind is ExtraKind.MATRIX:
        return extra.shape[0] != base
    return extra.kind is ExtraKind.TOKEN_ROWS and extra.token_ids[-1] >= base


def _is_without_gap(extra: Extra, base: int | None) -> bool:
    """Whether rows of added tokens begin where the base's end."""
    if base is None or extra.kind is not ExtraKind.TOKEN_ROWS:
        return True
    added = [token for token in extra.token_ids if token >= base]
    return added == list(range(base, base + len(added)))


def _refused(tensor: TensorEntry, fault: str) -> AdapterRejected:
    return AdapterRejected(
        "resized_vocabulary",
        f"{tensor.name} {list(tensor.shape)}: {fault}. " + refusal_message("resized_vocabulary"),
        pointer=tensor.name,
    )
