"""Whether the weights of a base fit is known before they are read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.checkpoint.weights import build_model, load_config
from loraplex.engine.config import GIB, EngineConfig, Quantization
from loraplex.engine.errors import InsufficientMemory
from loraplex.engine.memory.weights_room import check_weights_fit
from loraplex.engine.model import whole_base
from loraplex.engine.model.rounded_linears import rounded_format
from support.families import SERVED, save_family

CPU = torch.device("cpu")


def check(memory_bytes: int | None, *, num_inputs: int = 1 << 14) -> None:
    """Of a layer whose weights take 1 GiB in float32."""
    with torch.device("meta"):
        layer: Any = torch.nn.Linear(num_inputs, 1 << 14, bias=False)
    config = EngineConfig("owner/base", memory_bytes=memory_bytes)
    check_weights_fit(config, layer, torch.float32, CPU)


def test_weights_that_fit_are_not_refused() -> None:
    check(None, num_inputs=16)
    check(GIB)


def test_a_limit_that_is_too_low_is_named_with_what_is_needed() -> None:
    with pytest.raises(InsufficientMemory, match=r"need 1\.0 GiB in float32, and --memory-gib"):
        check(GIB - 1)


def test_a_base_larger_than_the_free_memory_is_refused() -> None:
    with pytest.raises(InsufficientMemory, match=r"GiB of memory are free"):
        check(None, num_inputs=1 << 28)


def test_no_weight_is_read_of_a_base_that_does_not_fit(
    tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_base, "load_weights", None)
    config = EngineConfig(str(tiny_base), memory_bytes=1)
    with pytest.raises(InsufficientMemory, match="models check"):
        whole_base.load_base_model(config, check_room=partial(check_weights_fit, config))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"embedding_quantization": Quantization.INT8}),
        ("deepseek_v3-mla", {}),
        ("mixtral", {}),
    ],
)
def test_the_rounded_copy_has_to_fit_too(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    kind, differences = SERVED[family]
    dense = {"first_k_dense_replace": 99} if family.startswith("deepseek") else {}
    path = save_family(tmp_path, kind, {**differences, **dense})
    config = EngineConfig(
        str(path), device="cpu", dtype="float32", speculation=("quantized:int4",), **settings
    )
    base = whole_base.load_base_model(config, rounded=rounded_format(config))
    with torch.device("meta"):
        empty = build_model(load_config(path))
    num_weights = sum(parameter.numel() for parameter in empty.parameters())
    needed = 4 * num_weights + base.rounded_bytes

    def check_base(memory_bytes: int) -> None:
        with torch.device("meta"):
            model = build_model(load_config(path))
        limited = replace(config, memory_bytes=memory_bytes)
        check_weights_fit(limited, model, torch.float32, CPU)

    check_base(needed)
    with pytest.raises(InsufficientMemory, match="and a copy in int4 for drafts"):
        check_base(needed - 1)
