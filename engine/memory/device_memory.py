"""Memory of the engine's device: what is free, and the peak of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from .host_memory import available_host_bytes, status_bytes


class DeviceMemory(NamedTuple):
    """Memory of the device, after the weights are loaded."""

    free_bytes: int
    is_host: bool
    """The device is the host: its memory also holds the host cache and the swap space."""


def measure_memory(device: torch.device) -> DeviceMemory:
    return DeviceMemory(available_bytes(device), is_host=device.type == "cpu")


def available_bytes(device: torch.device) -> int:
    """Memory that could still be allocated on the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # PyTorch keeps what was freed, as weights that became codes
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes()


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """By how much `run` raises the device's memory at its highest point."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux: the reserve has to do
        run()
        return 0
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status_bytes(status, "VmRSS")
    run()
    return max(0, status_bytes(status, "VmHWM") - before)
