"""A server killed between two effects: acknowledged data is kept, other data leaves no trace.

`make adapter-evidence` tests every failpoint; this is the one where most could be lost.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loraplex.adapters.failpoints import (
    BATCH_FAILPOINTS,
    EVALUATION_FAILPOINTS,
    FAILPOINTS,
    TENANT_FAILPOINTS,
    TUNING_FAILPOINTS,
    WEBHOOK_FAILPOINTS,
)
from support.crash_points import run_crash_points

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_a_kill_loses_nothing_acknowledged_and_leaves_no_orphan(tmp_path: Path) -> None:
    assert run_crash_points(points=["pushes.stored"], directory=tmp_path) == {
        "tried": 1,
        "lost": 0,
        "orphans": 0,
    }


def test_every_failpoint_stands_in_exactly_one_place() -> None:
    sources = [path.read_text() for path in (ROOT / "api").rglob("*.py")]
    placed = [name for text in sources for name in re.findall(r'failpoint\("([a-z.]+)"\)', text)]
    # Bytes of uploads are acknowledged on this server's disk, or in the store.
    for name in ("uploads.written", "uploads.acknowledged"):
        placed.remove(name)
    named = (
        *(FAILPOINTS, BATCH_FAILPOINTS, EVALUATION_FAILPOINTS, TENANT_FAILPOINTS),
        *(TUNING_FAILPOINTS, WEBHOOK_FAILPOINTS),
    )
    assert sorted(placed) == sorted(name for names in named for name in names)
