"""Whether the weights of a base fit is known before they are read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from loraplex.engine.config import GIB, EngineConfig
from loraplex.engine.errors import InsufficientMemory
from loraplex.engine.memory.weights_room import check_weights_fit
from loraplex.engine.model import base_model

CPU = torch.device("cpu")


def check(memory_bytes: int | None, *, num_inputs: int = 1 << 14) -> None:
    """Of a layer whose weights take 1 GiB in float32."""
    with torch.device("meta"):
        layer = torch.nn.Linear(num_inputs, 1 << 14, bias=False)
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
    monkeypatch.setattr(base_model, "load_weights", None)
    config = EngineConfig(str(tiny_base), memory_bytes=1)
    with pytest.raises(InsufficientMemory, match="models check"):
        base_model.load_base_model(config, check_room=partial(check_weights_fit, config))
