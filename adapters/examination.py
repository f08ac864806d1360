"""One look at an adapter: parse, bind, check, measure, and write its canonical block.

A pure function of files. `intake` runs it in a process with limits; tests and self-checks call it
directly.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .binding import BoundSlice, bind
from .canonical import WrittenBlock, block_dtype, write_block
from .errors import AdapterRejected
from .identity import TensorDigest, adapter_digest
from .layout import BaseLayout
from .peft_config import MAX_CONFIG_BYTES, PeftConfig, parse_peft_config, pattern_matches
from .safetensors_header import TensorEntry, read_safetensors_header
from .strict_json import shown
from .weights import Array, check_range, content_bytes, delta_norm, read_tensor, to_float32

NUM_REPORTED_MODULES = 8


@dataclass(frozen=True, slots=True)
class ModuleDelta:
    """How much the adapter changes one module's weight."""

    module: str
    norm: float
    """Frobenius norm of scale·B·A."""


@dataclass(frozen=True, slots=True)
class IntakeWarning:
    """Something the tenant should know that does not prevent serving."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class IntakeReport:
    """What intake found out about an accepted adapter, and the block it wrote."""

    digest: str
    base_id: str
    file_sha256: str
    """Hex SHA-256 of the block file."""
    size_bytes: int
    """Size of the block file."""
    dtype: str
    """`F32`, `F16` or `BF16`: the block's element type."""
    num_parameters: int
    num_modules: int
    min_rank: int
    max_rank: int
    targets: tuple[str, ...]
    """Last part of the touched modules' names, such as `q_proj`, sorted."""
    delta_norm: float
    """Frobenius norm of the whole change to the base's weights."""
    largest_deltas: tuple[ModuleDelta, ...]
    """The most changed modules, at most eight, largest first."""
    warnings: tuple[IntakeWarning, ...] = ()


def examine(
    config_path: Path,
    weights_path: Path,
    output_path: Path,
    *,
    layout: BaseLayout,
    serving_dtype: str,
    declared_base_id: str | None = None,
    base_model_name: str | None = None,
) -> IntakeReport:
    """Examine an adapter and write its canonical block to the new file `output_path`.

    `serving_dtype` is `float32`, `float16` or `bfloat16`. `declared_base_id` is the base the
    uploader named, if any; `base_model_name` is compared with the trainer's for a warning only.

    Raises AdapterRejected with a reason of `rejections.REJECTIONS`; nothing is written then.
    """
    _check_declared_base(declared_base_id, layout)
    config = parse_peft_config(_read_config(config_path))
    with weights_path.open("rb") as weights:
        tensors = read_safetensors_header(weights, weights_path.stat().st_size)
        bound = bind(tensors, config, layout)
        hashes, deltas = _measure(weights, bound, serving_dtype)
        digest = adapter_digest(hashes, config.canonical(), layout.base_id)
        block = write_block(output_path, weights=weights, bound=bound, layout=layout, digest=digest)
    warnings = _warnings(config, bound, deltas, base_model_name)
    return _report(digest, layout, block, bound=bound, deltas=deltas, warnings=warnings)


def _check_declared_base(declared: str | None, layout: BaseLayout) -> None:
    if declared is not None and declared != layout.base_id:
        raise AdapterRejected(
            "base_mismatch",
            f"the adapter declares base {shown(declared)}; this server runs {layout.base_id}",
        )


def _read_config(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_CONFIG_BYTES + 1)


def _measure(
    weights: BinaryIO, bound: Sequence[BoundSlice], serving_dtype: str
) -> tuple[list[TensorDigest], list[ModuleDelta]]:
    """Hash and check every tensor, and measure every module's change."""
    hashes: list[TensorDigest] = []
    deltas: list[ModuleDelta] = []
    for part in bound:
        stored_a, stored_b = read_tensor(weights, part.a), read_tensor(weights, part.b)
        hashes += [_tensor_digest(part.a, stored_a), _tensor_digest(part.b, stored_b)]
        a, b = to_float32(stored_a, part.a.dtype), to_float32(stored_b, part.b.dtype)
        check_range(a, part.a.name, scale=1.0, serving_dtype=serving_dtype)
        check_range(b, part.b.name, scale=part.scale, serving_dtype=serving_dtype)
        deltas.append(ModuleDelta(part.module, delta_norm(a, b, part.scale)))
    if not any(delta.norm for delta in deltas):
        raise AdapterRejected("no_effect", "every product of B and A is zero")
    return hashes, deltas


def _tensor_digest(tensor: TensorEntry, stored: Array) -> TensorDigest:
    sha256 = hashlib.sha256(content_bytes(stored)).digest()
    return TensorDigest(tensor.name, tensor.dtype, tensor.shape, sha256)


def _report(
    digest: str,
    layout: BaseLayout,
    block: WrittenBlock,
    *,
    bound: Sequence[BoundSlice],
    deltas: Sequence[ModuleDelta],
    warnings: tuple[IntakeWarning, ...],
) -> IntakeReport:
    ranks = [part.rank for part in bound]
    largest = sorted(deltas, key=lambda delta: delta.norm, reverse=True)
    return IntakeReport(
        digest=digest,
        base_id=layout.base_id,
        file_sha256=block.sha256,
        size_bytes=block.size_bytes,
        dtype=block_dtype(bound),
        num_parameters=sum(_num_parameters(part) for part in bound),
        num_modules=len(bound),
        min_rank=min(ranks),
        max_rank=max(ranks),
        targets=tuple(sorted({part.module.rpartition(".")[2] for part in bound})),
        delta_norm=math.hypot(*(delta.norm for delta in deltas)),
        largest_deltas=tuple(largest[:NUM_REPORTED_MODULES]),
        warnings=warnings,
    )


def _num_parameters(part: BoundSlice) -> int:
    return part.rank * (part.a.shape[1] + part.b.shape[0])


def _warnings(
    config: PeftConfig,
    bound: Sequence[BoundSlice],
    deltas: Sequence[ModuleDelta],
    base_model_name: str | None,
) -> tuple[IntakeWarning, ...]:
    modules = [part.module for part in bound]
    found = {
        "base_name_differs": _base_name_difference(config.base_model_name, base_model_name),
        "pattern_unmatched": _listed(_unmatched_patterns(config, modules)),
        "target_without_tensors": _listed(_absent_targets(config, modules)),
        "modules_without_effect": _listed([delta.module for delta in deltas if not delta.norm]),
    }
    return tuple(IntakeWarning(code, message) for code, message in found.items() if message)


def _base_name_difference(trained: str | None, served: str | None) -> str:
    if trained is None or served is None or _last_part(trained) == _last_part(served):
        return ""
    return f"trained on {shown(trained)}, served on {shown(served)}"


def _last_part(name: str) -> str:
    """A checkpoint's own name: hub owner or local directory do not matter."""
    return name.rstrip("/").rpartition("/")[2].lower()


def _unmatched_patterns(config: PeftConfig, modules: Sequence[str]) -> list[str]:
    patterns: Mapping[str, object] = {**dict(config.rank_pattern), **dict(config.alpha_pattern)}
    return [key for key in patterns if not any(pattern_matches(key, name) for name in modules)]


def _absent_targets(config: PeftConfig, modules: Sequence[str]) -> list[str]:
    present = {suffix for name in modules for suffix in _dotted_suffixes(name)}
    return [target for target in config.target_modules if target not in present]


def _dotted_suffixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _listed(names: Sequence[str]) -> str:
    """The first few names, shown safely; empty if there are none."""
    if not names:
        return ""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(shown(name) for name in names[:4]) + more
