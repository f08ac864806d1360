"""Copies between host and device for which the host does not wait.

On CUDA, a copy from or to ordinary memory waits for everything that the device has been given, a
step in flight included. Page-locked memory is copied while the host goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(
    values: Tensor | npt.NDArray[np.generic] | Sequence[int] | Sequence[float],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """These values on the device, in the order of its current stream: a copy, but for a tensor or
    an array on the CPU."""
    if isinstance(values, np.ndarray) and dtype is None:
        host = torch.from_numpy(values)  # takes a third of the time
    else:
        host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cpu":
        return host
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


class HostCopy:
    """A copy of a tensor on the host, complete once the device has come so far."""

    def __init__(self, source: Tensor) -> None:
        """Start copying; later work on the device may change the source."""
        self._copied: torch.cuda.Event | None = None
        self._check: Callable[[], None] | None = None
        if source.is_cuda:
            self._host = torch.empty_like(source, device="cpu", pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(source.device))
        else:
            self._host = source.clone()

    def check_with(self, check: Callable[[], None]) -> None:
        """Call this in `read` once the copy is complete. It raises an error if what the device has
        computed means nothing."""
        self._check = check

    def read(self) -> Tensor:
        """The copy; waits for it, and for no later work."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._check is not None:
            self._check()
        return self._host
