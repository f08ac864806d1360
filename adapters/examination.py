"""Examines an adapter: parses, binds, checks and measures it, and writes its canonical block.

A pure function of files. `intake` runs it in a process with limits; tests and self-checks call it
directly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .added_tokens import AddedToken
from .binding import bind
from .block import ExtraKind
from .bound import Binding
from .canonical import WrittenBlock, block_dtype, write_block
from .classification import HEAD_NAMES, Classification, labels_of
from .errors import AdapterRejected
from .identity import adapter_digest
from .invocation import InvocationTokens, check_vocabulary
from .layout import BaseLayout
from .measuring import Measured, ModuleDelta, check_base_copies, check_twins, measure
from .peft_config import MAX_CONFIG_BYTES, PeftConfig, parse_peft_config, pattern_matches
from .resized_ends import vocabulary_of
from .safetensors_header import read_safetensors_header
from .served_features import check_activated, features_of
from .strict_json import shown
from .tensor_names import parse_tensor_name

NUM_REPORTED_MODULES = 8
MAX_BASE_NAME_CHARACTERS = 256
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class IntakeWarning:
    """Something the tenant should know that does not prevent serving."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class IntakeReport:
    """The measurements of an accepted adapter, and its block."""

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
    """The smallest rank; 0 if the adapter has only full matrices, biases or token rows."""
    max_rank: int
    targets: tuple[str, ...]
    """Last part of the touched modules' names, such as `q_proj`, sorted."""
    delta_norm: float
    """Frobenius norm of the whole change to the base's weights."""
    largest_deltas: tuple[ModuleDelta, ...]
    """The most changed modules, at most eight, largest first."""
    warnings: tuple[IntakeWarning, ...] = ()
    features: tuple[str, ...] = ()
    """The PEFT features it uses, by their names in `formats.SERVED`, in that order."""
    trained_on: str | None = None
    """The trainer's name of the base, unless that is very long."""
    vocab_size: int | None = None
    """The rows of the adapter's embedding and head, if it is not the base's number."""
    added_tokens: tuple[AddedToken, ...] = ()
    """The texts of its added tokens."""
    classification: Classification | None = None
    """The meaning of its classification head's outputs, if it has one."""
    invocation_token_ids: InvocationTokens = ()
    """The adapter acts from these tokens of a prompt on; empty: on all."""


def examine(
    config_path: Path,
    weights_path: Path,
    output_path: Path,
    *,
    layout: BaseLayout,
    serving_dtype: str,
    declared_base_id: str | None = None,
    base_model_name: str | None = None,
    max_full_matrix_bytes: int = 0,
) -> IntakeReport:
    """Examine an adapter and write its canonical block to `output_path`, a file that is replaced.

    `serving_dtype` is `float32`, `float16` or `bfloat16`. `declared_base_id` is the base the
    uploader named, if any; `base_model_name` is compared with the trainer's for a warning only.
    `max_full_matrix_bytes` bounds what whole matrices of one adapter take together when served.

    Raises AdapterRejected with a reason of `rejections.REJECTIONS`; nothing is written then.
    """
    _check_declared_base(declared_base_id, layout)
    config = parse_peft_config(_read_config(config_path))
    with weights_path.open("rb") as weights:
        tensors = read_safetensors_header(weights, weights_path.stat().st_size)
        binding = bind(tensors, config, layout)
        _check_full_matrices(binding, max_full_matrix_bytes, serving_dtype)
        check_base_copies(weights, binding.copies, layout)
        check_twins(weights, binding.twins)
        config = _with_added_rows(config, binding)
        classification = _classification(config, binding)
        named = config.added_tokens
        config = _without_absent_tokens(config, binding, layout)
        check_vocabulary(config.invocation, vocabulary_of((), layout, layout.embedding))
        features = features_of(binding, config, layout)
        check_activated(features)
        measured = measure(weights, binding, layout, serving_dtype)
        digest = adapter_digest(measured.hashes, config.canonical(), layout.base_id)
        block = write_block(
            output_path,
            weights=weights,
            binding=binding,
            config=config,
            layout=layout,
            digest=digest,
        )
    absent = named[len(config.added_tokens) :]
    warnings = _warnings(config, binding, measured, base_model_name, absent)
    return _report(
        digest,
        layout,
        block,
        binding=binding,
        measured=measured,
        warnings=warnings,
        features=features,
        config=config,
        classification=classification,
    )


def _with_added_rows(config: PeftConfig, binding: Binding) -> PeftConfig:
    """The configuration of the adapter as its block holds it."""
    return replace(config, trained_tokens=binding.added_rows) if binding.added_rows else config


def _without_absent_tokens(config: PeftConfig, binding: Binding, layout: BaseLayout) -> PeftConfig:
    """The configuration without tokens for which the model has no rows: a trainer that only pads
    with a token of its own may save none."""
    size = binding.vocab_size or vocabulary_of((), layout, layout.embedding) or 0
    kept = tuple(token for token in config.added_tokens if token.id < size)
    return replace(config, added_tokens=kept)


def _classification(config: PeftConfig, binding: Binding) -> Classification | None:
    """Raises AdapterRejected if its labels are not those of its head."""
    for part in binding.auxiliary:
        if part.extra.kind is ExtraKind.CLASSIFICATION_HEAD:
            labels = labels_of(config.labels, part.layer.out_features)
            return Classification(labels, config.problem_type)
    return None


def _check_declared_base(declared: str | None, layout: BaseLayout) -> None:
    if declared is not None and declared != layout.base_id:
        raise AdapterRejected(
            "base_mismatch",
            f"the adapter declares base {shown(declared)}; this server runs {layout.base_id}",
        )


def _read_config(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_CONFIG_BYTES + 1)


def _check_full_matrices(binding: Binding, max_bytes: int, serving_dtype: str) -> None:
    """A full matrix takes as much memory as thousands of ranks, so the operator decides."""
    matrices = [part for part in binding.auxiliary if part.extra.kind is ExtraKind.MATRIX]
    num_bytes = sum(part.extra.num_elements for part in matrices) * _ITEM_BYTES[serving_dtype]
    if not matrices or num_bytes <= max_bytes:
        return
    pointer, mebibytes = matrices[0].tensor.name, num_bytes / (1 << 20)
    if max_bytes == 0:
        raise AdapterRejected(
            "full_matrix_not_allowed",
            f"{pointer}: full matrices require --max-full-matrix-mib of at least "
            f"{math.ceil(mebibytes)} on the server; LoRA on the module does not",
            pointer=pointer,
        )
    raise AdapterRejected(
        "full_matrix_too_large",
        f"{pointer}: whole matrices take {mebibytes:.1f} MiB, --max-full-matrix-mib allows"
        f" {max_bytes / (1 << 20):.1f}",
        pointer=pointer,
    )


def _report(
    digest: str,
    layout: BaseLayout,
    block: WrittenBlock,
    *,
    binding: Binding,
    measured: Measured,
    warnings: tuple[IntakeWarning, ...],
    features: tuple[str, ...],
    config: PeftConfig,
    classification: Classification | None,
) -> IntakeReport:
    ranks = [part.rank for part in binding.slices] or [0]
    modules = _touched_modules(binding)
    largest = sorted(measured.deltas, key=lambda delta: delta.norm, reverse=True)
    return IntakeReport(
        digest=digest,
        base_id=layout.base_id,
        file_sha256=block.sha256,
        size_bytes=block.size_bytes,
        dtype=block_dtype(binding),
        num_parameters=sum(math.prod(tensor.shape) for tensor in binding.tensors),
        num_modules=len(modules),
        min_rank=min(ranks),
        max_rank=max(ranks),
        targets=tuple(sorted({module.rpartition(".")[2] for module in modules})),
        delta_norm=math.hypot(*(delta.norm for delta in measured.deltas)),
        largest_deltas=tuple(largest[:NUM_REPORTED_MODULES]),
        warnings=warnings,
        features=features,
        trained_on=_trained_on(config),
        vocab_size=binding.vocab_size,
        added_tokens=config.added_tokens,
        classification=classification,
        invocation_token_ids=config.invocation,
    )


def _trained_on(config: PeftConfig) -> str | None:
    name = config.base_model_name
    return None if name is None or len(name) > MAX_BASE_NAME_CHARACTERS else name


def _touched_modules(binding: Binding) -> list[str]:
    """Each once, those with A and B first."""
    names = [part.module for part in binding.slices]
    return list(dict.fromkeys(names + [part.layer.name for part in binding.auxiliary]))


def _touched_paths(binding: Binding) -> list[str]:
    """The touched modules by their names in the base, and by those in the file."""
    names = (parse_tensor_name(tensor.name).module for tensor in binding.tensors)
    return list(dict.fromkeys([*_touched_modules(binding), *names]))


def _warnings(
    config: PeftConfig,
    binding: Binding,
    measured: Measured,
    base_model_name: str | None,
    absent: Sequence[AddedToken],
) -> tuple[IntakeWarning, ...]:
    paths = _touched_paths(binding)
    acting = {
        part.layer.name
        for part in binding.auxiliary
        if part.tensor.name not in measured.inert_auxiliary
    }
    inert = [
        delta.module for delta in measured.deltas if not delta.norm and delta.module not in acting
    ]
    found = {
        "base_name_differs": _base_name_difference(config.base_model_name, base_model_name),
        "pattern_unmatched": _saying(
            "no trained module matches", _unmatched_patterns(config, paths)
        ),
        "target_without_tensors": _saying(
            "named as targets, but the file has no tensors for", _absent_targets(config, paths)
        ),
        "modules_without_effect": _saying(
            "zero or equal to the base's, so without effect:", [*inert, *measured.inert_auxiliary]
        ),
        "base_weights_left_out": _saying(
            "copies of the base's weights, omitted:",
            [copy.tensor.name for copy in binding.copies],
        ),
        "added_tokens_left_out": _saying(
            "added tokens without rows in the embedding and the output head, left out:",
            [token.content for token in absent],
        ),
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
    paths = [path for name in modules for path in (name, f"{name}.weight")]
    return [key for key in patterns if not any(pattern_matches(key, path) for path in paths)]


def _absent_targets(config: PeftConfig, modules: Sequence[str]) -> list[str]:
    present = {suffix for name in modules for suffix in _dotted_suffixes(name)}
    listed = [*config.target_modules, *config.modules_to_save]
    if config.is_classifier:
        listed = [name for name in listed if name not in HEAD_NAMES]
    return [target for target in listed if target not in present]


def _dotted_suffixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _saying(what: str, names: Sequence[str]) -> str:
    return f"{what} {_listed(names)}" if names else ""


def _listed(names: Sequence[str]) -> str:
    """The first few names, shown safely."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(shown(name) for name in names[:4]) + more
