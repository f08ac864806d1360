"""The places that an adapter passes on its way to the device."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """A place an adapter's weights can be, slowest first."""

    STORE = "store"
    DISK = "disk"
    HOST = "host"
    DEVICE = "device"
