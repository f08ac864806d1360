"""Where each adapter is, and how it gets to the device. (contract; being written)"""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """A place an adapter's weights can be, slowest first."""

    STORE = "store"
    DISK = "disk"
    HOST = "host"
    DEVICE = "device"
