"""Whether an adapter fits the engine's memory for adapters."""

from __future__ import annotations

import structlog

from ...adapters.errors import AdapterRejected
from ...adapters.examination import IntakeReport
from ...engine.messages import EngineInfo

log = structlog.get_logger(__name__)

_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "float32": 4, "float16": 2, "bfloat16": 2}


def check_fits(report: IntakeReport, info: EngineInfo) -> None:
    """Raise AdapterRejected if the adapter exceeds the memory for all adapters. The log contains
    the size of this memory, but not the message, which the tenant reads."""
    room = min(info.arena_bytes, info.host_cache_bytes)
    needed = report.size_bytes * _ELEMENT_BYTES[info.dtype] // _ELEMENT_BYTES[report.dtype]
    if needed > room:
        log.info("adapter_too_large", adapter_digest=report.digest, needed=needed, room=room)
        raise AdapterRejected(
            "adapter_too_large",
            f"The adapter needs {needed} bytes, more than the memory reserved for adapters.",
        )
