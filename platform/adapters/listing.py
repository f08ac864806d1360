"""Lists of adapters for people: searched, sorted and counted by the database."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from .states import VersionState


class AdapterOrder(StrEnum):
    """By what a list is sorted; by name where that is the same. What is most comes first."""

    NAME = "name"
    NAME_DOWN = "-name"
    CREATED = "created"
    LAST_USED = "last_used"
    REQUESTS = "requests"
    BYTES = "bytes"
    P95 = "p95"


class AdapterQuery(NamedTuple):
    """Which adapters are wanted, and in which order."""

    search: str | None = None
    """A part of the name."""
    order: AdapterOrder = AdapterOrder.NAME
    state: VersionState | None = None
    """Of the latest version."""
