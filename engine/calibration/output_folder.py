"""The folder that a quantized checkpoint is written to, layer by layer.

A file has its name only when it is whole. `quantize-state.json` has the arguments and the finished
layers, so that an interrupted run is continued. `config.json` comes last: nothing serves the folder
without it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from ...adapters.durable import sync_directory
from ..checkpoint.base_config import CONFIG_FILE
from ..checkpoint.files import CONFIG_FILES
from ..checkpoint.packed_weights import find_packed_weights
from ..checkpoint.stored_tensors import INDEX_FILE, read_header
from ..checkpoint.stored_weights import Values
from ..checkpoint.unpacking import unpack
from ..errors import InvalidParameter

STATE_FILE = "quantize-state.json"


class OutputFolder:
    """Raises OSError if the disk refuses a file."""

    def __init__(
        self, path: Path, arguments: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        """arguments: everything that the tensors depend on, as JSON. settings: the
        `quantization_config`. Raises InvalidParameter if the folder holds anything else than a run
        with these arguments."""
        self._path = path
        self._arguments = json.loads(json.dumps(arguments))
        self._settings = settings
        self._errors: dict[int, float] = {}
        path.mkdir(parents=True, exist_ok=True)
        if (path / STATE_FILE).exists():
            self._continue()
        elif any(path.iterdir()):
            raise InvalidParameter("out", f"{path} is not empty: name a new folder")
        else:
            self._write_state()

    @property
    def errors(self) -> Mapping[int, float]:
        """The relative output errors of the layers that are finished."""
        return self._errors

    def free_bytes(self) -> int:
        """What the disk has left."""
        return shutil.disk_usage(self._path).free

    def size_bytes(self) -> int:
        """Of the weights that are written."""
        return sum(file.stat().st_size for file in self._path.glob("*.safetensors"))

    def has(self, name: str) -> bool:
        """Whether the file is written."""
        return (self._path / name).exists()

    def save_layer(
        self, index: int, name: str, tensors: Mapping[str, Tensor], *, error: float
    ) -> None:
        """Write a finished layer's file."""
        self.save(name, tensors)
        self._errors[index] = error
        self._write_state()

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a file of tensors."""
        contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
        self._write(name, save(contiguous, metadata={"format": "pt"}))

    def load_layer(self, name: str) -> dict[str, Values]:
        """The weights in a finished layer's file, by the names that they have in a model."""
        config = {"quantization_config": dict(self._settings)}
        path = self._path / name
        found = find_packed_weights(dict(read_header(path)), config, self._path)
        with safe_open(path, framework="pt") as file:
            values: dict[str, Values] = {key: file.get_tensor(key) for key in found.rest}
            for key, weight in found.weights.items():
                parts = {role: file.get_tensor(part) for role, part in weight.parts.items()}
                values[key] = unpack(weight, parts)
        return values

    def finish(self, model_dir: Path, names: Iterable[str]) -> None:
        """Write everything beside the weights, whose files are `names`."""
        self._write_index(names)
        for pattern in CONFIG_FILES:
            for file in sorted(model_dir.glob(pattern)):
                if file.name not in (CONFIG_FILE, INDEX_FILE):
                    self._write(file.name, file.read_bytes())
        config = json.loads((model_dir / CONFIG_FILE).read_bytes())
        self._write_json(CONFIG_FILE, config | {"quantization_config": dict(self._settings)})
        (self._path / STATE_FILE).unlink()

    def _write_index(self, names: Iterable[str]) -> None:
        weight_map = {key: name for name in names for key, _ in read_header(self._path / name)}
        index = {"metadata": {"total_size": self.size_bytes()}, "weight_map": weight_map}
        self._write_json(INDEX_FILE, index)

    def _continue(self) -> None:
        try:
            state = json.loads((self._path / STATE_FILE).read_bytes())
            arguments, errors = dict(state["arguments"]), dict(state["errors"])
        except (ValueError, KeyError, TypeError) as exc:
            raise InvalidParameter(
                "out", f"{self._path / STATE_FILE} is damaged: name a new folder"
            ) from exc
        for name, value in self._arguments.items():
            if arguments.get(name) != value:
                raise InvalidParameter(
                    "out",
                    f"{self._path} holds an unfinished run with another {name} "
                    f"({arguments.get(name)}, now {value}): continue it with the same arguments, "
                    "or name a new folder",
                )
        self._errors = {int(index): float(error) for index, error in errors.items()}

    def _write_state(self) -> None:
        self._write_json(STATE_FILE, {"arguments": self._arguments, "errors": self._errors})

    def _write_json(self, name: str, content: Any) -> None:
        self._write(name, (json.dumps(content, indent=2) + "\n").encode())

    def _write(self, name: str, content: bytes) -> None:
        unfinished = self._path / f"{name}.part"
        try:
            with unfinished.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self._path / name)
        finally:
            unfinished.unlink(missing_ok=True)
        sync_directory(self._path)
