"""The cache tiers of an adapter's weights: store, disk, host, device."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """A place an adapter's weights can be, slowest first."""

    STORE = "store"
    DISK = "disk"
    HOST = "host"
    DEVICE = "device"
