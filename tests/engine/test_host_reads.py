"""What of a model's code waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loraplex.engine.config import EngineConfig
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.host_reads import find_host_reads
from loraplex.engine.model.whole_base import load_base_model


@pytest.fixture(scope="module")
def base(tiny_base: Path) -> BaseModel:
    return load_base_model(EngineConfig(str(tiny_base), device="cpu"))


def has_large(x: Tensor) -> None:
    if x.max() > 1e6:
        x.clamp_(max=1e6)


READS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "a condition": (has_large, "_local_scalar_dense"),
    "an item": (lambda x: x[0, 0, 0].item(), "_local_scalar_dense"),
    "places": (lambda x: (x > 0).nonzero(), "nonzero"),
    "a mask": (lambda x: x[x > 0], "index.Tensor"),
    "a comparison": (lambda x: torch.equal(x, x), "equal"),
    "a copy elsewhere": (lambda x: x.to("meta", non_blocking=True), "_to_copy"),
}


@pytest.mark.parametrize(("read", "name"), READS.values(), ids=READS)
def test_what_reads_values_on_the_host_is_named_once(
    base: BaseModel, read: Callable[[Tensor], object], name: str
) -> None:
    hooks = [
        layer.register_forward_pre_hook(lambda _module, args: [read(args[0]), None][1])
        for layer in base.model.model.layers
    ]
    try:
        (found,) = find_host_reads(base.model)
    finally:
        for hook in hooks:
            hook.remove()
    assert name in found


def test_places_that_the_device_knows_and_host_tensors_are_no_reads(base: BaseModel) -> None:
    def compute(x: Tensor) -> None:
        order = x[0].argsort(dim=0)
        x[0].gather(0, order)
        x.index_select(2, order[:, 0])
        x[:, order[:, 0]].float().bfloat16()

    hook = base.model.model.layers[0].register_forward_pre_hook(
        lambda _module, args: compute(args[0])
    )
    try:
        assert find_host_reads(base.model) == []
    finally:
        hook.remove()
