"""Golden sets and evaluations: states, steps that are repeated, files in use."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import select

from loraplex.platform.adapters import service as catalog
from loraplex.platform.base import utc_now
from loraplex.platform.batches import files
from loraplex.platform.batches import service as batches
from loraplex.platform.batches.file_models import FilePurpose, StoredFile
from loraplex.platform.batches.models import Batch
from loraplex.platform.batches.states import BatchState
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    EvaluationNotFound,
    FileInUse,
    FileNotFound,
    GoldenSetNotFound,
    InvalidTransition,
    InvalidValue,
    QuotaExceeded,
)
from loraplex.platform.evaluations import golden_sets, service
from loraplex.platform.evaluations.golden_sets import NewGoldenSet
from loraplex.platform.evaluations.models import Evaluation
from loraplex.platform.evaluations.service import NewEvaluation, OpenEvaluation
from loraplex.platform.evaluations.states import OPEN_STATES, TRANSITIONS, EvaluationState
from loraplex.platform.keys.principal import ALL_SCOPES, Actor, ActorKind, Principal
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_version

KEY = "k" * 12


def principal_of(tenant: Tenant) -> Principal:
    return Principal(
        tenant_id=tenant.id,
        tenant_slug=tenant.slug,
        actor=Actor(ActorKind.KEY, KEY, "ci"),
        scopes=ALL_SCOPES,
        key_id=KEY,
    )


def file_row(file_id: str, purpose: FilePurpose = FilePurpose.EVALS) -> StoredFile:
    now = utc_now()
    return StoredFile(
        id=file_id,
        key_id=KEY,
        purpose=purpose,
        filename="golden.jsonl",
        size_bytes=1,
        sha256=file_id[-1] * 64,
        created_at=now,
        expires_at=now + timedelta(days=1),
    )


def put_set(session: TenantSession, tenant: Tenant, file_id: str = "file-1", **more: str) -> None:
    if not files.exists(session, file_id):
        files.add_upload(session, file_row(file_id))
    new = NewGoldenSet(
        adapter_name="bot",
        name=more.get("name", "golden"),
        file_id=file_id,
        num_cases=1,
        tolerance=0.0,
        judge=None,
        key_id=KEY,
        address=None,
        created_by="key:ci",
    )
    golden_sets.put(session, new, principal_of(tenant))


def evaluate(session: TenantSession, version: int, against: object = None) -> Evaluation:
    new = NewEvaluation(
        adapter_name="bot",
        golden_set="golden",
        version=version,
        against=against,  # type: ignore[arg-type]
        base_name="tiny",
        key_id=KEY,
        address=None,
        created_by="key:ci",
    )
    return service.create(session, new)


@pytest.fixture
def evaluation_id(database: Database, acme: Tenant) -> str:
    """An evaluation of `bot@2` against `bot@1`, which requests get."""
    with database.transaction(acme.id) as session:
        make_version(session, "bot", "first")
        catalog.set_alias(session, "bot", "prod", 1)
        make_version(session, "bot", "second")
        put_set(session, acme)
        return evaluate(session, 2).id


def ready(database: Database) -> list[OpenEvaluation]:
    with database.platform_transaction(read_only=True) as session:
        return list(service.list_ready_of_all_tenants(session))


def ask(database: Database, tenant: Tenant, evaluation_id: str, name: str = "answers") -> str:
    """The batch for which the evaluation waits after this step."""
    with database.transaction(tenant.id) as session:
        file = file_row(f"file-{name}", FilePurpose.BATCH)
        asking = service.add_batch(session, evaluation_id, name, file, "/v1/completions")
        assert asking.batch_id is not None
        return asking.batch_id


def test_an_evaluation_waits_for_its_batch_only(
    database: Database, acme: Tenant, evaluation_id: str
) -> None:
    this = OpenEvaluation(acme.id, evaluation_id)
    assert ready(database) == [this]
    with database.transaction(acme.id) as session:
        assert service.begin(session, evaluation_id).state is EvaluationState.RUNNING
    batch_id = ask(database, acme, evaluation_id)
    assert ready(database) == []
    with database.transaction(acme.id) as session:
        batch = batches.get_batch(session, batch_id)
        assert (batch.key_id, batch.labels) == (KEY, {"evaluation": evaluation_id})
        batches.fail(session, batch_id, [])
    assert ready(database) == [this]
    with database.transaction(acme.id) as session:
        service.succeed(session, evaluation_id, is_regression=False, slices=[], cases=[])
    assert ready(database) == []


def test_a_repeated_step_makes_no_second_batch(
    database: Database, acme: Tenant, evaluation_id: str
) -> None:
    first = ask(database, acme, evaluation_id)
    assert ask(database, acme, evaluation_id) == first
    with database.transaction(acme.id) as session:
        assert len(session.scalars(select(Batch)).all()) == 1


def test_the_target_is_the_served_version_or_the_base(
    database: Database, acme: Tenant, evaluation_id: str
) -> None:
    with database.transaction(acme.id) as session:
        assert service.get_evaluation(session, "bot", evaluation_id).against_number == 1
        assert evaluate(session, 1).against_digest is None, "the served version, with the base"
        assert evaluate(session, 2, "base").against_number is None
        assert evaluate(session, 1, 2).against_number == 2
        with pytest.raises(InvalidValue):
            evaluate(session, 1, 1)


def test_cancelling_ends_the_evaluation_and_its_batch(
    database: Database, acme: Tenant, evaluation_id: str
) -> None:
    batch_id = ask(database, acme, evaluation_id)
    with database.transaction(acme.id) as session:
        assert service.cancel(session, "bot", evaluation_id)[1]
        assert not service.cancel(session, "bot", evaluation_id)[1]
        assert batches.get_batch(session, batch_id).state is BatchState.CANCELLING
        service.succeed(session, evaluation_id, is_regression=False, slices=[], cases=[])
        ended = service.get_evaluation(session, "bot", evaluation_id)
        assert (ended.state, ended.slices) == (EvaluationState.CANCELLED, None)
        with pytest.raises(EvaluationNotFound):
            service.cancel(session, "other", evaluation_id)


def test_an_evaluation_that_ended_cannot_be_cancelled(
    database: Database, acme: Tenant, evaluation_id: str
) -> None:
    with database.transaction(acme.id) as session:
        service.begin(session, evaluation_id)
        service.fail(session, evaluation_id, code="scoring_failed", message="why")
        with pytest.raises(InvalidTransition):
            service.cancel(session, "bot", evaluation_id)


def test_a_file_is_in_use_by_sets_and_by_evaluations_that_have_not_ended(
    database: Database, acme: Tenant, evaluation_id: str
) -> None:
    with database.transaction(acme.id) as session:
        with pytest.raises(FileInUse, match="golden set `golden` of `bot`"):
            golden_sets.check_file_unused(session, "file-1")
        put_set(session, acme, "file-2")  # the evaluation keeps the earlier file
        golden_sets.check_file_unused(session, "file-1")
        with pytest.raises(FileInUse, match=evaluation_id):
            service.check_file_unused(session, "file-1")
    with database.platform_transaction(read_only=True) as session:
        assert golden_sets.list_needed_files_of_all_tenants(session) == {"file-2"}
        assert service.list_needed_files_of_all_tenants(session) == {"file-1"}
    with database.transaction(acme.id) as session:
        service.cancel_all(session)
        assert not service.has_open(session)
        service.check_file_unused(session, "file-1")


def test_another_tenants_file_or_evaluation_is_not_found(
    database: Database, acme: Tenant, bolt: Tenant, evaluation_id: str
) -> None:
    with database.transaction(bolt.id) as session:
        make_version(session, "bot")
        with pytest.raises(EvaluationNotFound):
            service.get_evaluation(session, "bot", evaluation_id)
        with pytest.raises(GoldenSetNotFound):
            evaluate(session, 1)
        with pytest.raises(FileNotFound):
            golden_sets.get_cases_file(session, "file-1", viewer=principal_of(bolt))


def test_open_evaluations_and_sets_are_limited(
    database: Database, acme: Tenant, evaluation_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_OPEN", 1)
    monkeypatch.setattr(golden_sets, "MAX_SETS", 1)
    with database.transaction(acme.id) as session:
        with pytest.raises(QuotaExceeded, match="evaluations"):
            evaluate(session, 2)
        with pytest.raises(QuotaExceeded, match="golden sets"):
            put_set(session, acme, name="second")
        put_set(session, acme, "file-2")


def test_ended_evaluations_are_purged_and_those_of_a_deleted_adapter_removed(
    database: Database, acme: Tenant, evaluation_id: str
) -> None:
    with database.platform_transaction() as session:
        assert service.purge(session, utc_now()) == 0
    with database.transaction(acme.id) as session:
        second = evaluate(session, 2).id
        service.cancel(session, "bot", evaluation_id)
    with database.platform_transaction() as session:
        assert service.purge(session, utc_now() - timedelta(days=1)) == 0
        assert service.purge(session, utc_now() + timedelta(seconds=1)) == 1
    with database.transaction(acme.id) as session:
        assert session.scalars(select(Evaluation.id)).all() == [second]
        service.remove_all(session, "bot")
        golden_sets.remove_all(session, "bot")
        assert session.scalars(select(Evaluation.id)).all() == []
        assert golden_sets.list_sets(session, "bot") == []


def test_states_change_only_forwards() -> None:
    assert {state for state, targets in TRANSITIONS.items() if targets} == OPEN_STATES
