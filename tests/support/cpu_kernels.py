"""The CPU's library in tests: some need it, some check what serves without it."""

from __future__ import annotations

import os

import pytest

from loraplex.kernels import cpu_library

needs_cpu_library = pytest.mark.skipif(
    cpu_library.cpu_library().functions is None and "CI" not in os.environ,
    reason=f"{cpu_library.cpu_library().detail} (package g++)",
)
"""In CI these tests fail instead."""


def remove_cpu_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch's operations serve, as on a machine without a compiler."""
    absent = cpu_library.CpuLibrary(None, "removed")
    monkeypatch.setattr(cpu_library, "function", lambda _name, _dtype: None)
    monkeypatch.setattr(cpu_library, "cpu_library", lambda: absent)
