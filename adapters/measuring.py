"""Hashes, checks and measures an adapter's values, one tensor at a time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from .arrangement import Arrangement, compose
from .block import ExtraKind
from .bound import BaseCopy, Binding, BoundExtra, BoundMatrix, BoundSlice, TwinTensor
from .errors import AdapterRejected
from .formats import refusal_message
from .identity import TensorDigest
from .layout import BaseLayout, SliceKind
from .safetensors_header import TensorEntry
from .weights import Array, check_range, content_bytes, delta_norm, read_tensor, to_float32


@dataclass(frozen=True, slots=True)
class ModuleDelta:
    """The adapter's change to one module's weight."""

    module: str
    norm: float
    """Frobenius norm of scale·B·A; of experts over all of them."""


class Measured(NamedTuple):
    """The measurements of an adapter's values."""

    hashes: tuple[TensorDigest, ...]
    deltas: tuple[ModuleDelta, ...]
    """Per slice with A and B."""
    inert_auxiliary: tuple[str, ...]
    """Auxiliary tensors without any effect: all zero, or equal to the base's."""


def measure(
    weights: BinaryIO, binding: Binding, layout: BaseLayout, serving_dtype: str
) -> Measured:
    """Hash and check every tensor, and measure the changes.

    Raises AdapterRejected if a value is out of range or if nothing has an effect on answers.
    """
    hashes: list[TensorDigest] = []
    deltas: list[ModuleDelta] = []
    for part in binding.slices:
        a, b = (
            compose(_checked(weights, matrices, serving_dtype, hashes))
            for matrices in (part.a, part.b)
        )
        deltas.append(ModuleDelta(part.module, _norm(part, a, b)))
    inert: list[str] = []
    has_effect = any(delta.norm for delta in deltas)
    for extra in binding.auxiliary:
        if extra.is_derived:
            continue
        stored = read_tensor(weights, extra.tensor)
        hashes.append(_tensor_digest(extra.tensor, stored))
        values = to_float32(stored, extra.tensor.dtype)
        check_range(values, extra.tensor.name, scale=extra.scale, serving_dtype=serving_dtype)
        if not values.any() or _is_the_bases(extra, values, layout):
            inert.append(extra.tensor.name)
        elif extra.extra.kind is not ExtraKind.DRAFT_HEAD:  # no answer depends on one
            has_effect = True
    if not has_effect:
        raise AdapterRejected(
            "no_effect", "every product of B and A, and all else but a draft head, is zero"
        )
    return Measured(tuple(hashes), tuple(deltas), tuple(inert))


def check_base_copies(weights: BinaryIO, copies: tuple[BaseCopy, ...], layout: BaseLayout) -> None:
    """Refuse a matrix that is no proven copy of the base's: leaving it out could change answers.

    Raises AdapterRejected pointing to the tensor.
    """
    for module, tensor in ((copy.module, copy.tensor) for copy in copies):
        values = to_float32(read_tensor(weights, tensor), tensor.dtype)
        if not _is_copy(values, layout, module):
            raise AdapterRejected(
                "base_weights_included",
                f"{tensor.name}: {refusal_message('base_weights')}",
                pointer=tensor.name,
            )


def check_twins(weights: BinaryIO, twins: tuple[TwinTensor, ...]) -> None:
    """Refuse two tensors that PEFT saves alike and that differ: one of them would be lost.

    Raises AdapterRejected pointing to the one that would be left out.
    """
    for twin in twins:
        kept, left_out = twin.kept, twin.left_out
        if kept.dtype == left_out.dtype and kept.shape == left_out.shape:
            same = content_bytes(read_tensor(weights, kept)) == content_bytes(
                read_tensor(weights, left_out)
            )
            if same:
                continue
        raise AdapterRejected(
            "config_contradiction",
            f"{left_out.name} differs from {kept.name}",
            pointer=left_out.name,
        )


def _is_the_bases(extra: BoundExtra, values: npt.NDArray[np.float32], layout: BaseLayout) -> bool:
    """Whether a full matrix was never trained; other kinds cannot be decided without the base."""
    if extra.extra.kind is not ExtraKind.MATRIX:
        return False
    return _is_copy(values, layout, extra.layer.name)


def _is_copy(values: npt.NDArray[np.float32], layout: BaseLayout, module: str) -> bool:
    """Whether these are the first rows of the base's matrix."""
    num_missing = layout.num_rows(module) - len(values)
    digests = layout.digests.get(module, [])
    return 0 <= num_missing < len(digests) and digests[num_missing] == _float32_digest(values)


def _float32_digest(values: npt.NDArray[np.float32]) -> str:
    return hashlib.sha256(content_bytes(values.astype("<f4", copy=False))).hexdigest()


def _tensor_digest(tensor: TensorEntry, stored: Array) -> TensorDigest:
    sha256 = hashlib.sha256(content_bytes(stored)).digest()
    return TensorDigest(tensor.name, tensor.dtype, tensor.shape, sha256)


def _checked(
    weights: BinaryIO,
    matrices: tuple[BoundMatrix, ...],
    serving_dtype: str,
    hashes: list[TensorDigest],
) -> Iterator[tuple[Arrangement, npt.NDArray[np.float32]]]:
    """The values of each tensor in float32, checked; their hashes are added to `hashes`."""
    for tensor, arrangement, scale in matrices:
        stored = read_tensor(weights, tensor)
        hashes.append(_tensor_digest(tensor, stored))
        values = to_float32(stored, tensor.dtype)
        check_range(values, tensor.name, scale=scale, serving_dtype=serving_dtype)
        yield arrangement, values


def _norm(part: BoundSlice, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    """Of all experts, for A and B as in a block, without their scale."""
    is_embedding = part.layer.kind is SliceKind.EMBEDDING
    downs = (a.T if is_embedding else a).reshape(part.layer.num_experts, part.rank, -1)
    ups = b.reshape(part.layer.num_experts, part.rank, -1)
    if part.row_scales:
        ups = ups * _factors(part).reshape(*ups.shape[:2], 1)
    return math.hypot(
        *(delta_norm(down, up.T, part.scale) for down, up in zip(downs, ups, strict=True))
    )


def _factors(part: BoundSlice) -> npt.NDArray[np.float32]:
    """Of each row of B."""
    num_rows, scales = zip(*part.row_scales, strict=True)
    return np.repeat(np.array(scales, np.float32), num_rows)
