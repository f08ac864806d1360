"""The CPU's library in tests: some need it, some check what serves without it."""

from __future__ import annotations

import os

import pytest
import torch

from loraplex.kernels import cpu_library

needs_cpu_library = pytest.mark.skipif(
    cpu_library.cpu_library().functions is None and "CI" not in os.environ,
    reason=f"{cpu_library.cpu_library().detail} (package g++)",
)
"""In CI these tests fail instead."""


def multiplies_bfloat16() -> bool:
    """Whether the library multiplies bf16 on this processor (AVX512_BF16)."""
    return cpu_library.function("linear_half", torch.bfloat16) is not None


def remove_cpu_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch's operations serve, as on a machine without a compiler."""
    absent = cpu_library.CpuLibrary(None, "removed")
    monkeypatch.setattr(cpu_library, "function", lambda _name, _dtype: None)
    monkeypatch.setattr(cpu_library, "cpu_library", lambda: absent)
