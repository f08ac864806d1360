"""Gates of aliases: which evaluation lets an alias move."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select

from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters.service import Canary
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    GateNotFound,
    GateNotPassed,
    GateRefused,
    GoldenSetInUse,
    GoldenSetNotFound,
    InvalidValue,
)
from loraplex.platform.evaluations import gates, golden_sets
from loraplex.platform.evaluations.gates import NewGate
from loraplex.platform.evaluations.models import AliasGate, Evaluation, GoldenSetRow
from loraplex.platform.evaluations.states import EvaluationState
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_version

KEY = "k" * 12


@pytest.fixture
def gated(database: Database, acme: Tenant) -> Tenant:
    """`bot` has three versions, and the alias `prod` of the first a gate of the set `golden`."""
    with database.transaction(acme.id) as session:
        for content in ("first", "second", "third"):
            make_version(session, "bot", content)
        catalog.set_alias(session, "bot", "prod", 1)
        session.add(
            GoldenSetRow(
                adapter_name="bot",
                name="golden",
                file_id="file-1",
                sha256="1" * 64,
                num_cases=1,
                tolerance=0.1,
                created_by="key:ci",
                updated_at=utc_now(),
            )
        )
        session.flush()
        gates.put(session, NewGate("bot", "prod", "golden", None, "key:ci"))
    return acme


def add_evaluation(
    session: TenantSession,
    version: int,
    against: int | None,
    *differences: float,
    **more: Any,
) -> str:
    """An evaluation that has succeeded with these differences by slice."""
    digest = catalog.get_version(session, "bot", version).digest
    against_digest = against and catalog.get_version(session, "bot", against).digest
    row: dict[str, Any] = {
        "id": f"eval-{len(session.scalars(select(Evaluation.id)).all())}",
        "adapter_name": "bot",
        "golden_set_name": "golden",
        "file_id": "file-1",
        "sha256": "1" * 64,
        "num_cases": 1,
        "tolerance": 0.0,
        "base_name": "tiny",
        "version_number": version,
        "version_digest": digest,
        "against_number": against,
        "against_digest": against_digest or None,
        "key_id": KEY,
        "state": EvaluationState.SUCCEEDED,
        "batches": {},
        "slices": [
            {"slice": f"s{at}", "difference": {"mean": mean}} for at, mean in enumerate(differences)
        ],
        "created_by": "key:ci",
        "created_at": utc_now(),
        **more,
    }
    session.add(Evaluation(**row))
    session.flush()
    return str(row["id"])


def test_an_alias_moves_with_an_evaluation_alone(database: Database, gated: Tenant) -> None:
    with database.transaction(gated.id) as session:
        with pytest.raises(GateNotPassed, match="version 2 needs an evaluation") as refused:
            catalog.set_alias(session, "bot", "prod", 2)
        error = refused.value
        assert (error.golden_set, error.version, error.against) == ("golden", 2, 1)
        assert error.evaluation_id is None
        passed = add_evaluation(session, 2, 1, 0.0, -0.1)
        catalog.set_alias(session, "bot", "prod", 2)
        change = catalog.list_alias_changes(session, "bot", "prod")[0]
        assert (change.version_number, change.evaluation_id) == (2, passed)
        assert change.override_reason is None


def test_an_evaluation_that_runs_is_named(database: Database, gated: Tenant) -> None:
    with database.transaction(gated.id) as session:
        running = add_evaluation(session, 2, 1, state=EvaluationState.RUNNING, slices=None)
        with pytest.raises(GateNotPassed) as refused:
            catalog.set_alias(session, "bot", "prod", 2)
        assert refused.value.evaluation_id == running


def test_a_regression_is_refused_with_its_slices(database: Database, gated: Tenant) -> None:
    with database.transaction(gated.id) as session:
        add_evaluation(session, 2, 1, 0.2, -0.11, -0.5)
        with pytest.raises(GateRefused, match=r"by more than 0\.1: s1 -0\.110, s2 -0\.500"):
            catalog.set_alias(session, "bot", "prod", 2)
        assert catalog.get_alias(session, "bot", "prod").version.number == 1
        gates.put(session, NewGate("bot", "prod", "golden", 0.5, "key:ci"))
        catalog.set_alias(session, "bot", "prod", 2)


@pytest.mark.parametrize(
    "other",
    [
        {"sha256": "2" * 64},
        {"judge": "tiny"},
        {"golden_set_name": "other"},
        {"version_digest": "sha256:" + "0" * 64},
        {"against_digest": None},
        {"against_digest": "sha256:" + "0" * 64},
        {"state": EvaluationState.FAILED},
        {"state": EvaluationState.CANCELLED},
    ],
)
def test_an_evaluation_of_something_else_does_not_count(
    database: Database, gated: Tenant, other: dict[str, Any]
) -> None:
    with database.transaction(gated.id) as session:
        add_evaluation(session, 2, 1, 0.0, **other)
        with pytest.raises(GateNotPassed):
            catalog.set_alias(session, "bot", "prod", 2)


def test_the_newest_evaluation_counts(database: Database, gated: Tenant) -> None:
    with database.transaction(gated.id) as session:
        add_evaluation(session, 2, 1, -0.5)
        newest = add_evaluation(session, 2, 1, 0.0)
        catalog.set_alias(session, "bot", "prod", 2)
        assert catalog.list_alias_changes(session, "bot", "prod")[0].evaluation_id == newest


def test_a_canary_passes_the_gate_and_ending_it_needs_none(
    database: Database, gated: Tenant
) -> None:
    with database.transaction(gated.id) as session:
        with pytest.raises(GateNotPassed):
            catalog.set_alias(session, "bot", "prod", 1, canary=Canary(2, 10.0))
        passed = add_evaluation(session, 2, 1, 0.0)
        catalog.set_alias(session, "bot", "prod", 1, canary=Canary(2, 10.0))
        assert catalog.list_alias_changes(session, "bot", "prod")[0].evaluation_id == passed
        catalog.set_alias(session, "bot", "prod", 1)
        assert catalog.list_alias_changes(session, "bot", "prod")[0].evaluation_id is None
        with pytest.raises(GateNotPassed, match="version 3"):
            catalog.set_alias(session, "bot", "prod", 2, canary=Canary(3, 10.0))


def test_a_new_alias_is_compared_with_the_base(database: Database, gated: Tenant) -> None:
    with database.transaction(gated.id) as session:
        gates.put(session, NewGate("bot", "beta", "golden", None, "key:ci"))
        with pytest.raises(GateNotPassed, match="against the base"):
            catalog.set_alias(session, "bot", "beta", 2)
        add_evaluation(session, 2, None, 0.0)
        catalog.set_alias(session, "bot", "beta", 2)


def test_an_override_is_kept_with_its_reason(database: Database, gated: Tenant) -> None:
    with database.transaction(gated.id) as session:
        add_evaluation(session, 2, 1, -0.5)
        catalog.set_alias(session, "bot", "prod", 2, override_reason="outage")
        change = catalog.list_alias_changes(session, "bot", "prod")[0]
        assert (change.evaluation_id, change.override_reason) == (None, "outage")
        passed = add_evaluation(session, 3, 2, 0.0)
        catalog.set_alias(session, "bot", "prod", 3, override_reason="not needed")
        change = catalog.list_alias_changes(session, "bot", "prod")[0]
        assert (change.evaluation_id, change.override_reason) == (passed, None)


def test_a_rollback_passes_no_gate(database: Database, gated: Tenant) -> None:
    with database.transaction(gated.id) as session:
        add_evaluation(session, 2, 1, 0.0)
        catalog.set_alias(session, "bot", "prod", 2)
        assert catalog.rollback_alias(session, "bot", "prod").version.number == 1


def test_an_upload_leaves_a_gated_alias_where_it_is(database: Database, gated: Tenant) -> None:
    with database.transaction(gated.id) as session:
        closed = catalog.set_free_aliases(session, "bot", ["prod", "free"], 2, changed_by=None)
        assert closed == ["prod"]
        assert catalog.get_alias(session, "bot", "prod").version.number == 1
        assert catalog.get_alias(session, "bot", "free").version.number == 2


def test_gates_are_replaced_and_removed_and_keep_their_set(
    database: Database, gated: Tenant
) -> None:
    with database.transaction(gated.id) as session:
        with pytest.raises(GoldenSetInUse, match="'prod'"):
            golden_sets.remove(session, "bot", "golden")
        gates.put(session, NewGate("bot", "prod", "golden", 0.2, "key:ci"))
        assert gates.get(session, "bot", "prod").tolerance == 0.2
        assert len(session.scalars(select(AliasGate)).all()) == 1
        gates.remove(session, "bot", "prod")
        with pytest.raises(GateNotFound):
            gates.remove(session, "bot", "prod")
        golden_sets.remove(session, "bot", "golden")
        with pytest.raises(GoldenSetNotFound):
            gates.put(session, NewGate("bot", "prod", "golden", None, "key:ci"))
        with pytest.raises(InvalidValue):
            gates.put(session, NewGate("bot", "latest", "golden", None, "key:ci"))
        catalog.set_alias(session, "bot", "prod", 2)
