"""Computes a model's norms, rotary embeddings and gated activations with a kernel each.

transformers computes each of them with several elementary calls, and differently from family to
family. As in `admission`, no list of names decides: a layer is replaced if the replacement gives
what the layer's own code gives. Otherwise it keeps its own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels import cpu_library
from ...kernels.gated_activation import Activation, gated_activation
from ...kernels.rms_norm import NormForm, rms_norm
from .agreement import agree
from .experts import are_served, matrices_shape
from .fused_rotary import fuse_rotary
from .linear import ProjectionSlice

SAMPLE_SCALES = (1e-4, 1e-3, 1.0, 3.0)
"""The magnitudes of a sample's rows. In the small ones the eps of a norm decides."""
Halves = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Computes an MLP's gate, and what it multiplies."""


class Share(NamedTuple):
    """How many layers of a kind are fused."""

    num_fused: int
    num_layers: int


NO_LAYERS = Share(0, 0)


@dataclass(frozen=True, slots=True)
class FusedLayers:
    """What `fuse_layers` has replaced."""

    norms: Share
    activations: Share
    """Of MLPs and of the experts of a layer."""
    rotary: Share
    """The calls in a forward pass."""
    layers: Share = NO_LAYERS
    """Decoder layers that are one call; see `decoder_layers`."""

    def __str__(self) -> str:
        kinds = {
            "RMS norms": self.norms,
            "gated activations": self.activations,
            "rotary embeddings": self.rotary,
            "decoder layers": self.layers,
        }
        parts = [
            f"{share.num_fused} of {share.num_layers} {kind}"
            for kind, share in kinds.items()
            if share.num_layers
        ]
        return f"fused: {', '.join(parts) or 'no layers'}"


def fuses_layers(device: torch.device) -> bool:
    """Whether bases on this device are fused: on the CPU, where its library computes the layers."""
    return device.type == "cuda" or cpu_library.cpu_library().functions is not None


def fuse_layers(model: nn.Module) -> FusedLayers:
    """Replace the layers of a model that has Loraplex's attention and linear layers."""
    weight = next(model.parameters())
    samples = _Samples(weight.dtype, weight.device)
    with torch.inference_mode():
        norms = [_fuse_norm(module, samples) for module in _norms(model)]
        activations = [
            *(_fuse_mlp(module, halves, samples) for module, halves in _mlps(model)),
            *(_fuse_experts(module, samples) for module in _gated_experts(model)),
        ]
    return FusedLayers(
        Share(sum(norms), len(norms)),
        Share(sum(activations), len(activations)),
        Share(*fuse_rotary(model)),
    )


class _Samples:
    """Random inputs of a layer, in the model's dtype."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._device = device

    def draw(self, size: int) -> Tensor:
        """`[1, len(SAMPLE_SCALES), size]`"""
        generator = torch.Generator().manual_seed(0)
        scales = torch.tensor(SAMPLE_SCALES, dtype=torch.float32)[:, None]
        rows = torch.randn(1, len(scales), size, generator=generator, dtype=torch.float32)
        return (rows * scales).to(self._device, self.dtype)


def _own_result(module: nn.Module, x: Tensor) -> Tensor | None:
    """What the module computes for this input alone; None if it needs others."""
    if len(signature(module.forward).parameters) != 1:
        return None
    try:
        result = module(x)
    except Exception:  # an input of this shape may mean nothing to it
        return None
    return result if isinstance(result, Tensor) else None


# Norms


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """The forward pass of a norm that `rms_norm` computes."""

    weight: Tensor | None
    eps: float
    form: NormForm
    dtype: torch.dtype
    own: Callable[[Tensor], Tensor]
    """The module's own, for other dtypes."""

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is self.dtype:
            return rms_norm(x, self.weight, self.eps, self.form)
        return self.own(x)


def _norms(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if "RMSNorm" in type(module).__name__ and _eps(module) is not None:
            yield module


def _eps(norm: nn.Module) -> float | None:
    values = [getattr(norm, name, None) for name in ("variance_epsilon", "eps")]
    return next((value for value in values if isinstance(value, float)), None)


def _fuse_norm(module: nn.Module, samples: _Samples) -> bool:
    weight, eps = getattr(module, "weight", None), _eps(module)
    assert eps is not None
    if weight is not None and (weight.ndim != 1 or weight.dtype != samples.dtype):
        return False
    x = samples.draw(64 if weight is None else len(weight))
    theirs = _own_result(module, x)
    if theirs is None:
        return False
    for form in NormForm:
        if agree(rms_norm(x, weight, eps, form), theirs):
            _replace_norm(module, eps, form, samples.dtype)
            return True
    return False


def _replace_norm(module: Any, eps: float, form: NormForm, dtype: torch.dtype) -> None:
    weight = getattr(module, "weight", None)
    # The weight stays where everything looks for it.
    module.__dict__["forward"] = FusedNorm(weight, eps, form, dtype, module.forward)


# Gated activations


@dataclass(frozen=True, slots=True)
class FusedMlp:
    """The forward pass of an MLP whose activation `gated_activation` computes."""

    halves: Halves
    activation: Activation
    down: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(gated_activation(*self.halves(x), self.activation))
        return result


def _mlps(model: nn.Module) -> Iterator[tuple[nn.Module, Halves]]:
    """The MLPs with a gate and their halves."""
    for module in model.modules():
        parts = dict(module.named_children())
        gate, up, both = (parts.get(name) for name in ("gate_proj", "up_proj", "gate_up_proj"))
        if not isinstance(parts.get("down_proj"), ProjectionSlice):
            continue
        if isinstance(gate, ProjectionSlice) and isinstance(up, ProjectionSlice):
            yield module, _separate(gate, up)
        elif isinstance(both, ProjectionSlice):
            yield module, _stacked(both)


def _separate(gate: nn.Module, up: nn.Module) -> Halves:
    return lambda x: (gate(x), up(x))


def _stacked(both: nn.Module) -> Halves:
    return lambda x: _halved(both(x))


def _halved(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, dim=-1)
    return gate, up


def _fuse_mlp(module: nn.Module, halves: Halves, samples: _Samples) -> bool:
    down = module.get_submodule("down_proj")
    x = samples.draw(_mlp_size(module))
    theirs = _input_of(down, module, x)
    if theirs is None:
        return False
    activation = _matching(*halves(x), theirs)
    if activation is None:
        return False
    module.__dict__["forward"] = FusedMlp(halves, activation, down)
    return True


def _mlp_size(module: nn.Module) -> int:
    parts = dict(module.named_children())
    first = parts.get("gate_proj") or parts["gate_up_proj"]
    assert isinstance(first, ProjectionSlice)
    return first.fused.projection.in_features


def _input_of(down: nn.Module, module: nn.Module, x: Tensor) -> Tensor | None:
    """What the module's own code gives to its last layer; None unless it returns that layer's
    result."""
    calls: list[tuple[Tensor, Tensor]] = []
    hook = down.register_forward_hook(lambda _module, args, out: calls.append((args[0], out)))
    try:
        result = _own_result(module, x)
    finally:
        hook.remove()
    if result is None or len(calls) != 1 or not torch.equal(result, calls[0][1]):
        return None
    return calls[0][0]


def _gated_experts(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if are_served(module) and module.has_gate)


def _fuse_experts(module: Any, samples: _Samples) -> bool:
    _, out_features, _ = matrices_shape(module, "gate_up_proj")
    x = samples.draw(out_features)[0]
    activation = _matching(*_halved(x), module._apply_gate(x))
    if activation is None:
        return False
    module.__dict__["_apply_gate"] = lambda x: gated_activation(*_halved(x), activation)
    return True


def _matching(gate: Tensor, up: Tensor, theirs: Tensor) -> Activation | None:
    if gate.shape != up.shape:
        return None
    for kind in Activation:
        if agree(gated_activation(gate, up, kind), theirs):
            return kind
    return None
