"""The identity of a base model, to which adapters are bound."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from ..gguf.header import GGUF_FILE

_VOLATILE_CONFIG_KEYS = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})
"""Keys that change when the same model is saved again."""
_TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
)


def compute_base_id(model_dir: Path) -> str:
    """SHA-256 over the config, the original checkpoint's bytes and the tokenizer.

    Independent of how the base is served: quantization and dtype belong to `compute_runtime_id`.
    Reads every shard once.
    """
    config = json.loads((model_dir / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}
    hasher = hashlib.sha256(b"loraplex base v1")
    _update(hasher, "config.json", json.dumps(kept, sort_keys=True).encode())
    tokenizer = [model_dir / name for name in _TOKENIZER_FILES if (model_dir / name).exists()]
    weights = [*sorted(model_dir.glob("*.safetensors")), *sorted(model_dir.glob(GGUF_FILE))]
    for path in [*weights, *tokenizer]:
        with path.open("rb") as file:
            _update(hasher, path.name, hashlib.file_digest(file, "sha256").digest())
    return "sha256:" + hasher.hexdigest()


def compute_runtime_id(
    base_id: str,
    *,
    quantization: str,
    quantization_group_size: int | None,
    quantization_exclude: Sequence[str],
    embedding_quantization: str,
    dtype: str,
    kv_dtype: str,
    attention_window: int | None,
    attention_sinks: int,
    tensor_parallel_size: int = 1,
) -> str:
    """The namespace of everything that depends on the base as served: KV cache, derived weights.

    `attention_window`, `attention_sinks`: the operator's limits on attention, which change the keys
    and values of all later layers. `tensor_parallel_size`: the ranks whose parts are
    added.
    """
    hasher = hashlib.sha256(b"loraplex runtime v4")
    for name, value in (
        ("base", base_id),
        ("quantization", quantization),
        ("quantization_group_size", str(quantization_group_size)),
        ("quantization_exclude", json.dumps(list(quantization_exclude))),
        ("embedding_quantization", embedding_quantization),
        ("dtype", dtype),
        ("kv_dtype", kv_dtype),
        ("attention_window", str(attention_window)),
        ("attention_sinks", str(attention_sinks)),
    ):
        _update(hasher, name, value.encode())
    if tensor_parallel_size > 1:
        _update(hasher, "tensor_parallel_size", str(tensor_parallel_size).encode())
    return "sha256:" + hasher.hexdigest()


def _update(hasher: hashlib._Hash, name: str, value: bytes) -> None:
    for field in (name.encode(), value):
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
