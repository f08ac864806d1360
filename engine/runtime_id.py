"""The namespace of the KV cache of a base as it is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .checkpoint.base_identity import compute_runtime_id
from .config import EngineConfig

if TYPE_CHECKING:
    from .model.base_model import BaseModel


def served_runtime_id(config: EngineConfig, base: BaseModel) -> str:
    """The namespace of what depends on the base as this engine serves it."""
    return configured_runtime_id(
        config, base.layout.base_id, dtype=str(base.dtype).removeprefix("torch.")
    )


def configured_runtime_id(config: EngineConfig, base_id: str, *, dtype: str) -> str:
    """That of an engine with this configuration. `dtype`: the resolved one, such as `bfloat16`."""
    windowed = config.attention_window is not None
    return compute_runtime_id(
        base_id,
        quantization=config.quantization,
        quantization_group_size=config.quantization_group_size,
        quantization_exclude=config.quantization_exclude,
        embedding_quantization=config.embedding_quantization,
        dtype=dtype,
        kv_dtype=config.kv_dtype,
        attention_window=config.attention_window,
        attention_sinks=config.attention_sinks if windowed else 0,
        tensor_parallel_size=config.tensor_parallel_size,
    )
