"""Names of the devices that trainers use. Torch-free."""

from __future__ import annotations

AUTO = "auto"
"""The engine's own device."""


def is_device_name(name: str) -> bool:
    """Whether it is auto, cpu, cuda or cuda with a number."""
    kind, _, number = name.partition(":")
    if kind == "cuda" and ":" in name:
        return number.isascii() and number.isdigit()
    return name in (AUTO, "cpu", "cuda")


def is_same_device(trainer: str, engine: str) -> bool:
    """Whether a trainer on this device takes what an engine on that one has. CUDA without a number
    is the first device."""
    if trainer == AUTO:
        return True
    return _with_number(trainer) == _with_number(engine)


def _with_number(name: str) -> str:
    return "cuda:0" if name == "cuda" else name
