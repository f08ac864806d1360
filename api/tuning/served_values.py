"""Whether this machine's base has the values that the replicas of a fleet serve."""

from __future__ import annotations

from pathlib import Path

from ...engine.checkpoint.base_identity import compute_base_id
from ...engine.config import EngineConfig
from ...engine.messages import EngineInfo
from ...engine.runtime_id import configured_runtime_id
from ...platform.errors import InvalidValue


def check_served_values(config: EngineConfig, model: Path, info: EngineInfo) -> None:
    """Raises InvalidValue if a trainer with these settings would train on others. Reads every shard
    of the base once.

    model: the base's folder here; info: of the replicas.
    """
    runtime_id = configured_runtime_id(config, info.base_id, dtype=info.dtype)
    if runtime_id != info.runtime_id:
        message = "--tuning: give this server the engine options of the fleet's agents."
        raise InvalidValue(message, param="tuning")
    if compute_base_id(model) != info.base_id:
        message = f"--tuning: {model} is not the base that the fleet's agents serve."
        raise InvalidValue(message, param="tuning")
