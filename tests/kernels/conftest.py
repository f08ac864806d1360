"""Fixtures for kernels: memory filled with NaN, and Triton's interpreter."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import loraplex.kernels.lora
from support.cpu_kernels import remove_cpu_library


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` returns with NaN, so that nothing unwritten can pass unseen."""
    empty = torch.empty

    def poisoned_empty(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        if tensor.is_floating_point():
            return tensor.fill_(torch.nan)
        limits = torch.iinfo(tensor.dtype)
        return tensor.fill_(max(limits.min, -(2**31)) or limits.max)

    monkeypatch.setattr(torch, "empty", poisoned_empty)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads and lose much where cores are shared."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def without_cpu_library(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_cpu_library(monkeypatch)


@pytest.fixture
def interpreted_lora() -> ModuleType:
    return interpreted("lora_triton")


@pytest.fixture(scope="session")
def interpreted_codes() -> ModuleType:
    return interpreted("wna16_triton")


@pytest.fixture
def interpreted_expert_codes(
    nearest_bf16: None, interpreted_codes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """Stands for the compiled module, where `WNA16Experts` imports it."""
    # Its kernel calls one of the other module.
    monkeypatch.setitem(sys.modules, "loraplex.kernels.wna16_triton", interpreted_codes)
    module = interpreted("wna16_experts_triton")
    monkeypatch.setitem(sys.modules, "loraplex.kernels.wna16_experts_triton", module)
    return module


@pytest.fixture
def interpreted_attention(interpreted_reductions: None) -> ModuleType:
    return interpreted("attention_triton")


@pytest.fixture
def interpreted_attention_groups(
    interpreted_attention: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    # It imports kernels of the other module.
    monkeypatch.setitem(sys.modules, "loraplex.kernels.attention_triton", interpreted_attention)
    return interpreted("attention_groups_triton")


@pytest.fixture
def interpreted_kv_write(interpreted_reductions: None) -> ModuleType:
    return interpreted("kv_write_triton")


@pytest.fixture
def interpreted_expert_pairs(interpreted_reductions: None) -> ModuleType:
    return interpreted("expert_pairs_triton")


@pytest.fixture
def interpreted_grouped_linear(nearest_bf16: None) -> ModuleType:
    return interpreted("grouped_linear_triton")


@pytest.fixture
def interpreted_rms_norm(interpreted_reductions: None) -> ModuleType:
    return interpreted("rms_norm_triton")


@pytest.fixture
def interpreted_rotary() -> ModuleType:
    return interpreted("rotary_triton")


@pytest.fixture
def interpreted_gated_activation() -> ModuleType:
    return interpreted("gated_activation_triton")


@pytest.fixture
def interpreted_recurrence(interpreted_reductions: None) -> ModuleType:
    return interpreted("recurrence_triton")


@pytest.fixture
def interpreted_selective_scan(interpreted_reductions: None) -> ModuleType:
    return interpreted("selective_scan_triton")


@pytest.fixture
def interpreted_lora_vectors(nearest_bf16: None) -> ModuleType:
    return interpreted("lora_vectors_triton")


@pytest.fixture
def nearest_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let interpreted kernels round fp32 to the nearest bf16, as a device does. The interpreter
    cuts the last bits off."""
    language = pytest.importorskip("triton.language")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    convert = interpreter._convert_float

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (language.float32, language.bfloat16):
            return convert(values, source, target, mode)
        return torch.tensor(values).bfloat16().view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@pytest.fixture
def interpreted_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let interpreted kernels call `tl.max` and the like, which Triton itself decorates."""
    language = pytest.importorskip("triton.language")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    for name in ("max", "min", "sum"):
        function = interpreter.InterpretedFunction(getattr(language, name).fn)
        monkeypatch.setattr(language, name, function)


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an element of an interpreted `tl.dot` depend on its own row and column alone, as on a
    device. numpy's matmul rounds by where a row lies in its matrix and by the matrix's width."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        products = a.data[:, None].astype(np.float64) * np.ascontiguousarray(b.data.T)
        total = products.sum(axis=-1).astype(d.data.dtype) + d.data
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@cache
def interpreted(name: str) -> ModuleType:
    """A second copy of a module of `loraplex.kernels` whose Triton kernels run on CPU tensors.

    Triton looks at TRITON_INTERPRET when a kernel is decorated. It is set only while this copy is
    imported, under a name of its own, so that the copy the product uses is compiled as ever.
    """
    pytest.importorskip("triton")
    source = Path(loraplex.kernels.lora.__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"loraplex.kernels.{name}_interpreted", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    return module
