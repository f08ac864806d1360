"""Finds the operations of a model that read the device's values on the host.

A step of such a model waits for the device, and a captured graph of it would repeat what was read
once. As in `admission`, no list of names decides: a few tokens run through the model, and every
operation is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .admission import run_probe
from .attention_windows import LayerProbe

_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_INDEXING = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
)
"""Only an index that is a mask has to be read, to count its places."""
_MASKS = (torch.bool, torch.uint8)
_READING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def find_host_reads(model: nn.Module) -> list[str]:
    """The operations of a captured step that wait for the device, each once, as PyTorch names them.

    For a model with Loraplex's attention, which is not run.
    """
    probe = LayerProbe()
    probe.is_captured = True
    reads = _HostReads(next(model.parameters()).device)
    with reads, _capturing():
        run_probe(model, probe)
    return list(dict.fromkeys(reads.found))


@contextmanager
def _capturing() -> Iterator[None]:
    """Let the model's code find that its stream is being captured: transformers then leaves out
    checks of its inputs."""
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


class _HostReads(TorchDispatchMode):
    """While entered, notes the operations that wait for a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # what it consists of
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        if self._reads(func, args, kwargs, result):
            self.found.append(str(func))
        return result

    def _reads(self, func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> bool:
        """Whether the host needs values of the device for this operation or its result."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if all(tensor.device != self._device for tensor in inputs):
            return False
        if func in _COPIES:
            return any(tensor.device != result.device for tensor in inputs)
        if func in _INDEXING:
            return any(index is not None and index.dtype in _MASKS for index in args[1])
        return not _READING_TAGS.isdisjoint(func.tags)
