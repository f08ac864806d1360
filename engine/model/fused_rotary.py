"""Rotates a served model's queries and keys with one kernel.

The modules of transformers that define a family call a function of their own namespace for this.
`fuse_rotary` replaces it there if it gives the same for the model's own queries and keys.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.rotary import is_rotatable, rotary
from .admission import run_probe
from .agreement import agree
from .attention_windows import LayerProbe
from .forward import current_forward

ROTARY_NAME = "apply_rotary_pos_emb"
"""transformers' function, in most modules that define a family."""


class ServedRotary:
    """Stands for transformers' function in the module that defines a family.

    It rotates in the steps of served models. Everything else, such as a dense reference, gets
    transformers' own function, and so does a call with other shapes or arguments.
    """

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own
        self.kinds: set[tuple[torch.dtype, str]] = set()
        """The dtypes and devices of models for which both agree."""

    def __call__(self, *args: Any, **others: Any) -> Any:
        if current_forward.get() is None or others or not _are_rotatable(args):
            return self.own(*args, **others)
        q = args[0]
        return rotary(*args) if (q.dtype, q.device.type) in self.kinds else self.own(*args)


class _RotaryTrial:
    """transformers' function, and how many of a probe's calls `rotary` computes alike.

    All other calls, such as those of a model in another thread, get the function found before.
    """

    def __init__(self, found: Callable[..., Any], own: Callable[..., Any]) -> None:
        self._found = found
        self._own = own
        self.probe = LayerProbe()
        self.num_calls = 0
        self.agreed: list[bool] = []
        """One for each call with arguments of `rotary`."""
        self.kinds: set[tuple[torch.dtype, str]] = set()

    def __call__(self, *args: Any, **others: Any) -> Any:
        if current_forward.get() is not self.probe:
            return self._found(*args, **others)
        result = self._own(*args, **others)
        self.num_calls += 1
        if not others and _are_rotatable(args):
            self.agreed.append(all(map(agree, rotary(*args), result)))
            self.kinds.add((args[0].dtype, args[0].device.type))
        return result


def _are_rotatable(args: tuple[Any, ...]) -> bool:
    return len(args) == 4 and all(isinstance(x, Tensor) for x in args) and is_rotatable(*args)


def fuse_rotary(model: nn.Module) -> tuple[int, int]:
    """Replace the function for a model that has Loraplex's attention. Models of a process are fused
    one after another.

    Returns how many of its calls in a forward pass are replaced, and the number of all.
    """
    num_fused, num_calls = 0, 0
    for name in sorted({type(module).__module__ for module in model.modules()}):
        family = sys.modules[name]
        found = getattr(family, ROTARY_NAME, None)
        if found is None:
            continue
        served = found if isinstance(found, ServedRotary) else ServedRotary(found)
        trial = _RotaryTrial(found, served.own)
        setattr(family, ROTARY_NAME, trial)
        try:
            run_probe(model, trial.probe)
        finally:
            setattr(family, ROTARY_NAME, found)
        num_calls += trial.num_calls
        if trial.agreed and all(trial.agreed):
            num_fused += len(trial.agreed)
            served.kinds |= trial.kinds
            setattr(family, ROTARY_NAME, served)
    return num_fused, num_calls
