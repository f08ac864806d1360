"""An adapter as tensors of a training process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...local.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from ..errors import InvalidAdapter


def write_adapter(directory: Path, tensors: Mapping[str, Any], peft_config: Any) -> None:
    """Write the files that PEFT's save_pretrained would.

    `tensors` is what `peft.get_peft_model_state_dict` returns: torch tensors on any device, or
    numpy arrays. `peft_config` is a PeftConfig, or its fields. Raises InvalidAdapter.
    """
    if not tensors:
        raise InvalidAdapter("There are no tensors. Use peft.get_peft_model_state_dict(model).")
    (directory / CONFIG_FILE).write_text(_config_json(peft_config), encoding="utf-8")
    try:
        _write_weights(directory / WEIGHTS_FILE, tensors)
    except (TypeError, ValueError, AttributeError) as exc:
        raise InvalidAdapter(f"The tensors cannot be written as safetensors: {exc}") from exc


def _config_json(peft_config: Any) -> str:
    fields = peft_config.to_dict() if hasattr(peft_config, "to_dict") else peft_config
    if not isinstance(fields, Mapping):
        raise InvalidAdapter(
            "peft_config is neither a PeftConfig nor its fields. Use model.peft_config['default']."
        )
    try:
        return json.dumps(dict(fields), default=_as_list, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise InvalidAdapter(f"peft_config cannot be written as JSON: {exc}") from exc


def _as_list(value: object) -> list[Any]:
    """PEFT keeps `target_modules` as a set."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _write_weights(path: Path, tensors: Mapping[str, Any]) -> None:
    import numpy as np

    if all(isinstance(tensor, np.ndarray) for tensor in tensors.values()):
        from safetensors.numpy import save_file

        save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)
        return
    import torch
    from safetensors.torch import save_file as save_torch_file

    # Copies: tensors that share memory are refused.
    copies = {
        name: torch.as_tensor(tensor).detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    save_torch_file(copies, path)
