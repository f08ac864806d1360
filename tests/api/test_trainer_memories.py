"""The memory of trainers."""

from __future__ import annotations

import os

from loraplex.api.telemetry.trainer_memories import TrainerMemories


def test_a_trainer_holds_memory_only_on_its_own_machine() -> None:
    memories = TrainerMemories()
    memories.add("here", pid=os.getpid(), tenant_id="acme", adapter="bot")
    memories.add("elsewhere", pid=None, tenant_id="acme", adapter="bot")
    memories.note_step("elsewhere", 700)
    here, elsewhere = memories.measure()
    assert here.resident_bytes > 1 << 20
    assert (elsewhere.job_id, elsewhere.resident_bytes, elsewhere.step_bytes) == (
        "elsewhere",
        0,
        700,
    )
