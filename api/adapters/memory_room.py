"""Whether an adapter fits the engine's memory for adapters."""

from __future__ import annotations

from ...adapters.errors import AdapterRejected
from ...adapters.examination import IntakeReport
from ...engine.messages import EngineInfo

_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "float32": 4, "float16": 2, "bfloat16": 2}


def check_fits(report: IntakeReport, info: EngineInfo) -> None:
    """Raise AdapterRejected if the adapter exceeds the memory for all adapters. A note, which the
    operator's log has, contains the size of this memory, but not the message, which the tenant
    reads."""
    room = min(info.arena_bytes, info.host_cache_bytes)
    needed = report.size_bytes * _ELEMENT_BYTES[info.dtype] // _ELEMENT_BYTES[report.dtype]
    if needed > room:
        rejected = AdapterRejected(
            "adapter_too_large",
            f"The adapter needs {needed} bytes, more than the memory reserved for adapters.",
        )
        rejected.add_note(f"It has room for {room} bytes.")
        raise rejected
