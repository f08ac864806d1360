"""A data folder on a disk of 60 MB: the tenant that fills it is refused, the others are served."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.full_disk import DISK_BYTES, can_mount, run_in_namespace
from support.tools import need

SERVED = {"key": "ok", "chat": "ok"}


@pytest.mark.skipif("LORAPLEX_FULL_DISK" not in os.environ, reason="make full-disk runs it")
def test_others_work_on_a_disk_that_a_tenant_or_a_log_has_filled(
    tiny_base: Path, adapters: list[Path]
) -> None:
    need(can_mount(), "mounting a tmpfs in a namespace of its own is not allowed here")
    answers = run_in_namespace(tiny_base, adapters[0])

    first, second = answers["hogs"]
    assert set(first["codes"]) <= {"file_too_large", "disk_share_exceeded", "storage_full"}
    assert second["codes"][-1] in ("disk_share_exceeded", "storage_full")
    assert 0 < second["num_sent"] <= first["num_sent"] < DISK_BYTES // 2
    assert answers["free_when_filled"] > DISK_BYTES // 8, "the database's reserve"
    assert answers["quiet"] == {"pushed": "ready", **SERVED}
    assert answers["after_giving_up"]["num_sent"] > 0, "abandoned bytes are free at once"

    assert answers["free_when_full"] == 0
    assert answers["full"] == SERVED
    assert answers["restarted"] == SERVED
    assert answers["made_room"] == {"pushed": "ready", **SERVED}
