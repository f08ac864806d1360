"""Profiles decode steps of the benchmark's models, in this process. Needs the `engine` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ...adapters.examination import examine
from ...adapters.identity import AdapterKey
from ...engine.config import EngineConfig
from ...engine.core import EngineCore
from ...engine.parts import open_parts
from ...engine.step_profile import TENANT, DecodeLoad, StepProfile, profile_decode


def profile_models(
    config: EngineConfig,
    adapters: Sequence[Path],
    *,
    num_sequences: int,
    context: int,
    num_steps: int,
) -> StepProfile:
    """Serve the config's base with these adapters' folders.

    Raises EngineError, AdapterError or ProfileFailed.
    """
    core = EngineCore(open_parts(config))
    try:
        with TemporaryDirectory(prefix="loraplex-profile-") as blocks:
            keys = {}
            for index, folder in enumerate(adapters):
                path = Path(blocks, f"{index}.block")
                report = examine(
                    folder / "adapter_config.json",
                    folder / "adapter_model.safetensors",
                    path,
                    layout=core.info.layout,
                    serving_dtype=core.info.dtype,
                )
                keys[AdapterKey(TENANT, report.digest)] = path
            return profile_decode(core, DecodeLoad(num_sequences, context, keys), num_steps)
    finally:
        core.close()
