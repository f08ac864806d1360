"""The disk budget of uploads, in total and per tenant."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from loraplex.adapters.errors import StorageFull
from loraplex.api.adapters.staging_budget import Hold, StagingBudget
from loraplex.platform.errors import DiskShareExceeded


@dataclass
class Disk:
    """A disk of which the test says how much is free, and what lies there of each upload."""

    free: int = 1 << 40
    written: dict[str, int] = field(default_factory=dict)

    def budget(self, total_bytes: int = 1200, tenant_bytes: int | None = None) -> StagingBudget:
        return StagingBudget(
            total_bytes=total_bytes,
            tenant_bytes=tenant_bytes,
            free_bytes=lambda: self.free,
            written_bytes=lambda upload_id: self.written.get(upload_id, 0),
        )


def hold(number: int, tenant: str, num_bytes: int) -> Hold:
    return Hold(f"upload-{number}", tenant, num_bytes)


def take_all(budget: StagingBudget, tenant: str, *, step: int = 1) -> int:
    """How much the tenant gets, piece after piece."""
    taken = 0
    while True:
        try:
            budget.hold(hold(taken, tenant, step)._replace(upload_id=f"{tenant}-{taken}"))
        except (StorageFull, DiskShareExceeded):
            return taken
        taken += step


def test_each_tenant_leaves_as_much_as_it_takes() -> None:
    budget = Disk().budget(total_bytes=1200)
    assert take_all(budget, "first") == 600
    assert take_all(budget, "second") == 300
    assert take_all(budget, "third") == 150
    assert budget.held_bytes == 1050


def test_the_tenants_own_limit_has_its_own_code() -> None:
    budget = Disk().budget(tenant_bytes=100)
    budget.hold(hold(1, "acme", 60))
    with pytest.raises(DiskShareExceeded, match=r"100 bytes.*60 are used.*41 more"):
        budget.hold(hold(2, "acme", 41))
    budget.hold(hold(2, "acme", 40))
    assert budget.max_upload_bytes == 100


def test_an_upload_is_held_once_and_let_go_once() -> None:
    budget = Disk().budget()
    for _ in range(3):
        budget.hold(hold(1, "acme", 500))
    assert budget.held_bytes == 500
    budget.release("upload-1")
    budget.release("upload-1")
    assert budget.held_bytes == 0
    assert not budget.is_held("upload-1")


def test_what_was_let_in_fits_on_the_disk_to_its_end() -> None:
    """Sent, examined and stored it lies there three times."""
    disk = Disk(free=299)
    budget = disk.budget()
    with pytest.raises(StorageFull):
        budget.hold(hold(1, "acme", 100))
    assert budget.lacking_bytes(hold(1, "acme", 100)) == 1
    disk.free = 300
    budget.hold(hold(1, "acme", 100))
    with pytest.raises(StorageFull):
        budget.hold(hold(2, "bolt", 67))  # 200 are promised to nobody
    disk.free, disk.written["upload-1"] = 240, 60  # of which nothing changes
    with pytest.raises(StorageFull):
        budget.hold(hold(2, "bolt", 67))
    budget.hold(hold(2, "bolt", 66))


def test_what_is_written_beside_uploads_takes_what_is_promised_to_nobody() -> None:
    budget = Disk(free=300).budget()
    budget.hold(hold(1, "acme", 100))
    with budget.writing(200) as room:
        assert room == 200
        assert budget.lacking_to_write(1) == 1
        with pytest.raises(StorageFull), budget.writing(1):
            raise AssertionError("there is no room")
    assert budget.lacking_to_write(200) == 0


def test_the_last_ninth_of_the_room_is_for_others_than_who_stores_the_most() -> None:
    budget = Disk(free=100).budget()
    with pytest.raises(DiskShareExceeded, match="adapters and uploads"):
        budget.hold(hold(1, "hog", 10), stored_bytes=800)
    budget.hold(hold(1, "hog", 10), stored_bytes=700)
    budget.hold(hold(2, "quiet", 10), stored_bytes=0)


def test_of_many_that_race_for_the_last_bytes_as_many_win_as_fit() -> None:
    for seed in range(20):
        budget = Disk().budget(total_bytes=1000)
        wanted = [hold(number, f"tenant-{number}", 90) for number in range(30)]
        random.Random(seed).shuffle(wanted)

        def wins(each: Hold, budget: StagingBudget = budget) -> bool:
            try:
                budget.hold(each)
            except StorageFull:
                return False
            return True

        with ThreadPoolExecutor(8) as threads:
            won = sum(threads.map(wins, wanted))
        # A newcomer leaves at least as much as it takes: 1000 - 90 n >= 90.
        assert won == 10
        assert budget.held_bytes == 900


def test_after_a_restart_all_that_was_let_in_is_held_again() -> None:
    budget = Disk(free=0).budget(total_bytes=100)
    budget.restore([hold(1, "acme", 300), hold(2, "bolt", 5)])
    assert budget.held_ids == {"upload-1", "upload-2"}
    with pytest.raises(StorageFull):
        budget.hold(hold(3, "new", 1))
