"""The settings of a GGUF file's architecture. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

from ..errors import DamagedBase, UnsupportedModel
from .header import Array, GgufHeader

_UNUSED = frozenset(
    {
        *("vocab_size", "tensor_data_layout"),
        *("rope.scaling.finetuned", "rope.scaling.original_context_length"),
    }
)
"""Settings that change no answer, unless a scaling of the rotary embedding reads them."""


class Settings:
    """The settings of the file's architecture, which notices those that nothing read."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        prefix = header.architecture + "."
        self._values = {
            key.removeprefix(prefix): value
            for key, value in header.metadata.items()
            if key.startswith(prefix)
        }
        self._used: set[str] = set()

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive number. Raises DamagedBase without one, UnsupportedModel if layers differ."""
        value = self._value(key, default)
        if type(value) is not int or value <= 0:
            raise self._wrong(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number. Raises DamagedBase without one, UnsupportedModel if layers differ."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._wrong(key, value)
        return float(value)

    @property
    def head_dim(self) -> int:
        """The size of a head's keys and values."""
        num_heads = self.integer("attention.head_count")
        return self.integer("attention.key_length", self.integer("embedding_length") // num_heads)

    def text(self, key: str, default: str) -> str:
        """Raises DamagedBase if it is no text."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value)
        return value

    def has(self, key: str) -> bool:
        """Whether the file has the setting, and not as 0."""
        return bool(self._values.get(key))

    def flags(self, key: str) -> tuple[bool, ...]:
        """An array of one flag per layer. Raises DamagedBase if it is none."""
        value = self._values.get(key)
        self._used.add(key)
        if not isinstance(value, Array) or value.values is None:
            raise self._wrong(key, value)
        return tuple(map(bool, value.values))

    def must_be(self, key: str, expected: float) -> None:
        """Raises UnsupportedModel if the file has another value."""
        value = self._value(key, expected)
        if value != expected:
            raise self.unsupported(f"{key} is {value!r}, not {expected}")

    def check_all_used(self) -> None:
        """Raises UnsupportedModel for a setting that nothing read, unless it is 0 or false."""
        for key, value in self._values.items():
            if key not in self._used | _UNUSED and value:
                raise self.unsupported(f"its setting {key} is not supported")

    def unsupported(self, reason: str) -> UnsupportedModel:
        """The error for a file whose model is not served."""
        return UnsupportedModel(
            f"{self.header.path} ({self.header.architecture}): {reason}: give the original "
            "checkpoint"
        )

    def _value(self, key: str, default: Any) -> Any:
        self._used.add(key)
        value = self._values.get(key, default)
        if not isinstance(value, Array):
            return value
        values = set(value.values or ())
        if len(values) != 1:
            raise self.unsupported(f"{key} differs between layers")
        return values.pop()

    def _wrong(self, key: str, value: Any) -> DamagedBase:
        return DamagedBase(
            f"{self.header.path}: {self.header.architecture}.{key} is "
            f"{'missing' if value is None else repr(value)}: download the file again"
        )
