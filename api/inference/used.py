"""What a request has used of the engine, as the ledger counts it."""

from __future__ import annotations

import msgspec

from ...engine.messages import Resources


class Used(msgspec.Struct, frozen=True, array_like=True):
    """`Resources` in integers, so that sums are exact."""

    step_nanoseconds: int = 0
    kv_byte_seconds: int = 0
    loaded_bytes: int = 0
    fetched_bytes: int = 0

    @property
    def step_seconds(self) -> float:
        return self.step_nanoseconds / 1e9

    @classmethod
    def of(cls, resources: Resources) -> Used:
        return cls(
            round(1e9 * resources.step_seconds),
            round(resources.kv_byte_seconds),
            resources.loaded_bytes,
            resources.fetched_bytes,
        )
