"""Counts the bytes of tensors while code runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Counter(TorchDispatchMode):
    """Notes the storages that operations make, for as long as they exist."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = {_storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if _is_here(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _is_here(leaf) and (key := _storage_of(leaf)) not in given:
                storage = leaf.untyped_storage()
                self._live[key] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._live.values()))
        return result


def live_bytes(run: Callable[[], object]) -> int:
    """The most bytes of tensors that `run` makes and has at once, views and its inputs left out."""
    counter = _Counter()
    with torch.no_grad(), counter:
        run()
    return counter.peak


def _is_here(leaf: object) -> bool:
    """Whether it has a storage in host memory: weights in a layout of oneDNN have none."""
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu" and not leaf.is_mkldnn


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
