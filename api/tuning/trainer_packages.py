"""The packages of the extra `tune`, which trainers need."""

from __future__ import annotations

from importlib.util import find_spec


def missing_packages() -> list[str]:
    """Those that are not installed."""
    return [name for name in ("accelerate", "peft") if find_spec(name) is None]
