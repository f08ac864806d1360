"""An fp32 router with half-precision adapters, and the engine's requirements on routers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loraplex.adapters.arena import Arena
from loraplex.engine.model.expert_router import RouterProjection, find_routers
from loraplex.engine.model.forward import current_forward
from loraplex.kernels.lora_batch import AdapterRun, LoraBatch, LoraBatchBuilder
from loraplex.kernels.lora_reference import add_lora_reference
from support.lora_weights import PoisonedWeights, assert_lora_close, make_layout

NUM_EXPERTS, HIDDEN = 6, 20
LAYOUT = make_layout((8, (8,)), (HIDDEN, (NUM_EXPERTS,)))
"""The router is slice 1."""


class Router(nn.Module):
    """Multiplies in fp32, whatever the type of its weight."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, dtype=dtype))

    def forward(self, hidden_states: Tensor) -> Tensor:
        scores = F.linear(input=hidden_states.float(), weight=self.weight.float())
        return scores.sigmoid()


class Step:
    """A running step of which the router sees nothing but its adapters."""

    def __init__(self, lora: LoraBatch | None) -> None:
        self.lora = lora
        self.is_captured = False
        self.states = None
        self.rotary_rows = None

    def attend(self, *_args: Any) -> Tensor:
        raise NotImplementedError


@contextmanager
def running(step: Step) -> Iterator[None]:
    token = current_forward.set(step)
    try:
        yield
    finally:
        current_forward.reset(token)


def make_step(weights: PoisonedWeights, rows: list[int]) -> Step:
    runs = [AdapterRun(1, row, 1) for row in rows]
    builder = LoraBatchBuilder(weights, torch.device("cpu"))
    return Step(builder.build(runs, num_decodes=len(rows) // 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, HIDDEN), (1, 5, HIDDEN)])
def test_scores_get_the_deltas_before_what_the_family_does_with_them(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    weights = PoisonedWeights(LAYOUT, num_rows=3, dtype=dtype)
    weights.put(0, {1: 3})
    weights.put(1, {1: 4})
    rows = [0, -1, 1, 0, -1]
    module = Router(dtype)
    x = torch.randn(5, HIDDEN).to(dtype)
    scores = F.linear(x.float(), module.weight.float()).detach()
    plain = scores.sigmoid()
    table = weights.table[:, 1:]
    delta = torch.zeros_like(scores, dtype=dtype)
    add_lora_reference(x, delta, weights.flat, table, torch.tensor(rows), slice_outs=(NUM_EXPERTS,))
    router = RouterProjection("mlp.gate", module)
    router.attach(cast(Arena, weights), range(1, 2))

    with torch.inference_mode(), running(make_step(weights, rows)):
        result = module(x.view(shape)).view(5, NUM_EXPERTS)

    assert result.dtype == torch.float32
    torch.testing.assert_close(result, (scores + delta).sigmoid(), rtol=2e-2, atol=1e-2)
    if dtype is torch.float32:
        assert_lora_close(result, (scores + delta).sigmoid())
    base = torch.tensor(rows) < 0
    assert torch.equal(result[base], plain[base])
    assert not torch.isclose(result[~base], plain[~base], atol=0.05).all()


def test_the_router_is_its_own_outside_of_a_step_and_in_one_that_does_not_touch_it() -> None:
    weights = PoisonedWeights(LAYOUT, num_rows=2)
    weights.put(0, {0: 3})  # another projection
    module = Router()
    x = torch.randn(4, HIDDEN)
    expected = module(x)
    RouterProjection("mlp.gate", module).attach(cast(Arena, weights), range(1, 2))
    assert torch.equal(module(x), expected)
    for step in (Step(None), make_step(weights, [0, 0, -1, 0])):
        with running(step):
            assert torch.equal(module(x), expected)


class Experts(nn.Module):
    num_experts = NUM_EXPERTS


class Block(nn.Module):
    """An MoE layer as far as looking for its router goes; a model too."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.experts = Experts()
        self.router = router

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> None:
        self.router(torch.randn(input_ids.numel(), HIDDEN))


class Layers(nn.Module):
    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.mlp = Block(router)

    def forward(self, **inputs: Any) -> None:
        self.mlp(**inputs)


class TwiceRouter(Router):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + super().forward(hidden_states)


class OtherWeightRouter(Router):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.linear(hidden_states, self.weight / self.weight.norm())


class MatmulRouter(Router):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self.weight.T


@pytest.mark.parametrize("router", [Router(), Router(torch.bfloat16)])
def test_a_router_that_multiplies_by_its_weight_once_is_found(router: Router) -> None:
    assert find_routers(Layers(router), ["mlp.experts"]) == {"mlp.experts": "mlp.router"}
    assert "forward" not in vars(router)


@pytest.mark.parametrize(
    "router", [TwiceRouter(), OtherWeightRouter(), MatmulRouter(), nn.Linear(HIDDEN, NUM_EXPERTS)]
)
def test_what_works_in_another_way_is_not(router: nn.Module) -> None:
    assert find_routers(Layers(router), ["mlp.experts"]) == {}
