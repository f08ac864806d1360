"""Allocates large host memory whose pages are not touched before the first write."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_CACHE_LINE = 64


def untouched_zeros(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros `[num_elements]` that start on a cache line.

    From calloc, where torch would fill them; and numpy asks for huge pages, so that the loader
    threads that write first spend little time on page faults.
    """
    num_bytes = num_elements * dtype.itemsize
    untouched = np.zeros(num_bytes + _CACHE_LINE, dtype=np.uint8)
    start = -untouched.ctypes.data % _CACHE_LINE
    return torch.from_numpy(untouched[start : start + num_bytes]).view(dtype)
