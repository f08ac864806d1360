"""The routers of MoE layers, with each token's adapter applied to the scores of its experts.

A router's class multiplies its 2-D `weight` in one call of `F.linear` and then applies its family's
steps: softmax or sigmoid, groups, biases. These remain unchanged. While a step's adapters change
the router, their deltas are added to the result of that call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...adapters.layout import Projection, Slice
from ...kernels.lora import LoraProjection
from ...kernels.lora_batch import LoraBatch
from .forward import current_forward

if TYPE_CHECKING:
    from ...adapters.arena import Arena

LinearCall = Callable[[Tensor, Tensor, Tensor], None]
"""Sees one call of `F.linear`: its input, its weight, its result."""


class RouterProjection:
    """One router and its position in the adapters' tables."""

    def __init__(self, path: str, module: nn.Module) -> None:
        """From now on this object computes `module`, whose path in the model is `path`."""
        weight = _weight(module)
        self.projection = Projection((Slice(path, weight.shape[1], weight.shape[0]),))
        self._forward = module.forward
        module.__dict__["forward"] = self.forward  # the module's other attributes remain
        self._arena: Arena | None = None
        self._lora: LoraProjection | None = None
        self._slice_index = 0

    def attach(self, arena: Arena, slice_range: range) -> None:
        """From now on, rows of the step's adapters get their LoRA delta from this arena."""
        self._arena = arena
        self._slice_index = slice_range.start
        projection = self.projection
        self._lora = LoraProjection(
            self._slice_index, projection.in_features, (projection.out_features,)
        )

    def forget_adapter(self, row: int) -> None:
        """Nothing to do: it has no copies of adapters' weights."""

    def forget_step(self) -> None:
        """Nothing to do: no tensor outlives the layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The router's own forward, its scores with the deltas of the step's adapters."""
        step = current_forward.get()
        lora = step.lora if step else None
        if step is None or lora is None or not (step.is_captured or self._is_touched(lora)):
            return self._forward(*args, **kwargs)
        with _LinearCalls(lambda x, _weight, scores: self._add(x, scores, lora)):
            return self._forward(*args, **kwargs)

    def _is_touched(self, lora: LoraBatch) -> bool:
        """Whether any adapter of a step that is not captured changes the router."""
        if self._arena is None:
            return False
        tables = self._arena.row_tables
        return any(tables[row][self._slice_index][2] for row in lora.adapter_rows)

    def _add(self, x: Tensor, scores: Tensor, lora: LoraBatch) -> None:
        """Add to `scores [..., num_experts]` of `x [..., hidden]`; many routers compute in fp32."""
        assert self._lora is not None
        assert self._arena is not None
        rows = x.reshape(-1, x.shape[-1])
        y = scores.view(-1, scores.shape[-1])
        dtype = self._arena.flat.dtype
        if x.dtype == y.dtype == dtype:
            self._lora.add(rows, y, self._arena, lora)
            return
        delta = torch.zeros_like(y, dtype=dtype)
        self._lora.add(rows.to(dtype), delta, self._arena, lora)
        y += delta


def find_routers(model: nn.Module, experts_paths: Iterable[str]) -> dict[str, str]:
    """For the experts at these paths: the path of their router, if it is supported.

    A router is supported if it calls `F.linear` once per forward pass, with its weight. A router
    that is a normal linear layer is excluded, because it is served as such.
    """
    routers = {}
    for experts_path in experts_paths:
        experts: Any = model.get_submodule(experts_path)
        parent, _, _ = experts_path.rpartition(".")
        for leaf, module in model.get_submodule(parent).named_children():
            if _could_route(module, experts.num_experts):
                routers[experts_path] = f"{parent}.{leaf}"
    multiplying = _multiplying_once(model, [model.get_submodule(path) for path in routers.values()])
    return {
        experts_path: path
        for experts_path, path in routers.items()
        if model.get_submodule(path) in multiplying
    }


def _could_route(module: nn.Module, num_experts: int) -> bool:
    weight = getattr(module, "weight", None)
    is_matrix = isinstance(weight, Tensor) and weight.ndim == 2 and len(weight) == num_experts
    return is_matrix and type(module) is not nn.Linear


def _multiplying_once(model: nn.Module, routers: Sequence[nn.Module]) -> set[nn.Module]:
    """The routers that call `F.linear` exactly once, with their weight, when the model runs a
    token."""
    weights: dict[nn.Module, list[Tensor]] = {router: [] for router in routers}
    if not routers:
        return set()
    with ExitStack() as stack:
        for router in routers:
            stack.enter_context(_watched(router, weights[router].append))
        parameter = next(model.parameters())
        token = torch.zeros(1, 1, dtype=torch.int64, device=parameter.device)
        sees_itself = parameter.new_zeros(1, 1, 1, 1)  # else it is computed from values
        with torch.inference_mode():
            model(input_ids=token, attention_mask=sees_itself, use_cache=False)
    return {
        router
        for router, seen in weights.items()
        if len(seen) == 1 and _is_same(seen[0], _weight(router))
    }


def _is_same(seen: Tensor, weight: Tensor) -> bool:
    """Equal, in whatever type; a skeleton has no values, there the shape must do."""
    if weight.is_meta:
        return seen.shape == weight.shape
    return torch.equal(seen.float(), weight.float())


def _weight(router: nn.Module) -> Tensor:
    """`[num_experts, hidden]`."""
    weight = router.weight
    assert isinstance(weight, Tensor)
    return weight


@contextmanager
def _watched(router: nn.Module, see_weight: Callable[[Tensor], None]) -> Iterator[None]:
    """Show the weight of each linear map that the router computes meanwhile."""
    inner = router.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _LinearCalls(lambda _x, weight, _y: see_weight(weight)):
            return inner(*args, **kwargs)

    router.__dict__["forward"] = forward
    try:
        yield
    finally:
        del router.__dict__["forward"]


class _LinearCalls(TorchFunctionMode):
    """While entered, shows every call of `F.linear` to an observer."""

    def __init__(self, observe: LinearCall) -> None:
        super().__init__()
        self._observe = observe

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is F.linear:
            self._observe(*_input_and_weight(*args, **kwargs), result)
        return result


def _input_and_weight(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The arguments by the names of `F.linear`, however it was called."""
    return input, weight
