"""What a request has used of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Resources:
    """Sums over the life of a request in one engine, or in several.

    What all requests have used together is what the engine has spent on them: nothing is counted
    twice.
    """

    step_seconds: float = 0.0
    """Its shares of the steps that computed it."""
    kv_byte_seconds: float = 0.0
    """Bytes of KV blocks on the device times seconds; a shared block is divided equally among its
    holders of each moment. In a group of ranks, the bytes of one rank."""

    loaded_bytes: int = 0
    """Bytes of adapters that were copied to the device: each load counts for the first request that
    uses it."""
    fetched_bytes: int = 0
    """The part of them that neither host memory nor disk had."""

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            step_seconds=self.step_seconds + other.step_seconds,
            kv_byte_seconds=self.kv_byte_seconds + other.kv_byte_seconds,
            loaded_bytes=self.loaded_bytes + other.loaded_bytes,
            fetched_bytes=self.fetched_bytes + other.fetched_bytes,
        )


NO_RESOURCES: Final = Resources()
