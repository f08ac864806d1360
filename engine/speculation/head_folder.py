"""A folder with draft heads of any kind: `config.json` and safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import InvalidParameter

CONFIG_NAME = "config.json"
_PICKLES = ("*.pt", "*.pth", "*.bin")


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """Reads and checks what is in the folder. Every method raises InvalidParameter with the folder
    and the reason."""

    kind: str
    """For messages."""
    path: Path

    def write(self, config: Mapping[str, Any], weights: str, tensors: dict[str, Tensor]) -> None:
        """`weights`: the file's name."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(config, indent=2) + "\n"
        (self.path / CONFIG_NAME).write_text(text, encoding="utf-8")
        save_file(tensors, self.path / weights)

    def read_config(self) -> dict[str, Any]:
        try:
            config = json.loads((self.path / CONFIG_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            self.refuse(f"{CONFIG_NAME} cannot be read: {exc}")
        if not isinstance(config, dict):
            self.refuse(f"{CONFIG_NAME} is no object")
        return config

    def check_base(
        self, config: Mapping[str, Any], sizes: Mapping[str, int], *, base_id: str | None
    ) -> None:
        """Check the data about the base, which original checkpoints lack. `base_id`: None if the
        caller does not know it."""
        for name, value in sizes.items():
            if config.get(name, value) != value:
                self.refuse(f"its {name} is {config[name]}, the base's {value}")
        if base_id is not None and config.get("base_id", base_id) != base_id:
            self.refuse("its heads were trained for another base")

    def number(self, config: Mapping[str, Any], name: str, largest: int) -> int:
        value = config.get(name)
        if type(value) is not int or not 1 <= value <= largest:
            self.refuse(f"{name} is {value!r}, not a number from 1 to {largest}")
        return value

    def tensor_names(self) -> frozenset[str]:
        """Of all tensors, from the files' headers."""
        names: set[str] = set()
        for file in self._weight_files():
            try:
                with safe_open(file, framework="numpy") as tensors:
                    names.update(tensors.keys())
            except (SafetensorError, OSError) as exc:
                self.refuse(f"{file.name} cannot be read: {exc}")
        return frozenset(names)

    def read_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for file in self._weight_files():
            try:
                tensors |= load_file(file)
            except (SafetensorError, OSError) as exc:
                self.refuse(f"{file.name} cannot be read: {exc}")
        return tensors

    def _weight_files(self) -> list[Path]:
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            pickles = sorted(file.name for pattern in _PICKLES for file in self.path.glob(pattern))
            if pickles:
                self.refuse(f"{pickles[0]} is a pickle, which is not read: save it as safetensors")
            self.refuse("there is no safetensors file")
        return files

    def check_tensors(
        self, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Exactly these floating-point tensors are there."""
        if missing := shapes.keys() - tensors.keys():
            self.refuse(f"{min(missing)} is missing")
        if unknown := tensors.keys() - shapes.keys():
            self.refuse(f"{min(unknown)} is no tensor of such heads")
        for name, shape in shapes.items():
            tensor = tensors[name]
            if tuple(tensor.shape) != shape or not tensor.is_floating_point():
                self.refuse(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {list(shape)}")

    def refuse(self, reason: str) -> NoReturn:
        raise InvalidParameter("speculation", f"{self.kind} in {self.path}: {reason}")
