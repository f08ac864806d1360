"""A rank that dies at a command ends no request without a code, and the group serves again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loraplex.engine.shards.rank_place import GroupShape
from support.command_kills import KINDS, Outcome, kill_at, plans
from support.planned_kill import Moment, PlannedKill
from support.rank_traffic import Traffic

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    return Traffic(tmp_path_factory.mktemp("traffic"))


@pytest.mark.parametrize(
    ("kind", "number", "moment", "rank"),
    [
        ("RunChunks", 5, Moment.EXCHANGE, 1),
        ("CopyAdapter", 1, Moment.SENT, 0),
    ],
)
def test_the_group_is_back_after_a_rank_is_killed_at_a_command(
    traffic: Traffic, tmp_path: Path, kind: str, number: int, moment: Moment, rank: int
) -> None:
    """A follower and rank 0. `make parallel-evidence` kills at every kind of command."""
    assert kind in KINDS
    plan = PlannedKill(kind, number, moment, rank, str(tmp_path / "killed"))
    outcome = asyncio.run(kill_at(plan, traffic, GroupShape(2, 1)))
    assert outcome == Outcome(happened=True, num_hanging=0, num_uncoded=0)


def test_a_kill_that_has_happened_is_refused(traffic: Traffic, tmp_path: Path) -> None:
    plan = PlannedKill("RunChunks", 1, Moment.SENT, 0, str(tmp_path / "killed"))
    (tmp_path / "killed").touch()
    with pytest.raises(FileExistsError):
        asyncio.run(kill_at(plan, traffic, GroupShape(2, 1)))


def test_every_shape_of_a_group_has_its_own_kills(tmp_path: Path) -> None:
    shapes = (GroupShape(2, 1), GroupShape(4, 1), GroupShape(1, 2), GroupShape(2, 2))
    markers = [plan.marker for shape in shapes for plan in plans(tmp_path, shape)]
    assert len(set(markers)) == len(markers) == len(shapes) * len(KINDS)
