"""Whether this machine's base has the values that the replicas of a fleet serve."""

from __future__ import annotations

from pathlib import Path

from ...engine.checkpoint.base_identity import compute_base_id, compute_runtime_id
from ...engine.config import EngineConfig
from ...engine.messages import EngineInfo
from ...platform.errors import InvalidValue


def check_served_values(config: EngineConfig, model: Path, info: EngineInfo) -> None:
    """Raises InvalidValue if a trainer with these settings would train on others. Reads every shard
    of the base once.

    model: the base's folder here; info: of the replicas.
    """
    runtime_id = compute_runtime_id(
        info.base_id,
        quantization=config.quantization,
        quantization_group_size=config.quantization_group_size,
        quantization_exclude=config.quantization_exclude,
        embedding_quantization=config.embedding_quantization,
        dtype=info.dtype,
        kv_dtype=config.kv_dtype,
        attention_window=config.attention_window,
        attention_sinks=0 if config.attention_window is None else config.attention_sinks,
        tensor_parallel_size=config.tensor_parallel_size,
    )
    if runtime_id != info.runtime_id:
        message = "--tuning: give this server the engine options of the fleet's agents."
        raise InvalidValue(message, param="tuning")
    if compute_base_id(model) != info.base_id:
        message = f"--tuning: {model} is not the base that the fleet's agents serve."
        raise InvalidValue(message, param="tuning")
