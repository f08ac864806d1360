"""The states of a batch and the results of its lines, against a small model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from loraplex.platform.base import utc_now
from loraplex.platform.batches import files, service
from loraplex.platform.batches.file_models import FilePurpose, StoredFile
from loraplex.platform.batches.service import Counts, NewBatch, Result
from loraplex.platform.batches.states import OPEN_STATES, TRANSITIONS, BatchState
from loraplex.platform.database import Database
from loraplex.platform.errors import BatchNotFound, FileNotFound, InvalidTransition, QuotaExceeded
from loraplex.platform.keys.principal import ALL_SCOPES, Actor, ActorKind, Principal
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant

NUM_LINES = 5


def principal_of(tenant: Tenant, adapters: frozenset[str] | None = None) -> Principal:
    return Principal(
        tenant_id=tenant.id,
        tenant_slug=tenant.slug,
        actor=Actor(ActorKind.KEY, "k" * 12, "ci"),
        scopes=ALL_SCOPES,
        key_id="k" * 12,
        adapters=adapters,
    )


def make_file(session: TenantSession, *, key_id: str = "k" * 12) -> StoredFile:
    now = utc_now()
    file = StoredFile(
        id=files.new_file_id(),
        key_id=key_id,
        purpose=FilePurpose.BATCH,
        filename="in.jsonl",
        size_bytes=1,
        sha256="0" * 64,
        created_at=now,
        expires_at=now.replace(year=now.year + 1),
    )
    files.add_upload(session, file)
    return file


def make_batch(session: TenantSession, viewer: Principal) -> str:
    new = NewBatch(
        endpoint="/v1/completions",
        input_file_id=make_file(session).id,
        key_id="k" * 12,
        address=None,
        labels=None,
    )
    return service.create(session, new, viewer).id


@dataclass
class Model:
    """What a batch is, as the documentation says."""

    state: BatchState = BatchState.VALIDATING
    is_closed: bool = False
    num_lines: int = 0
    results: dict[int, bool] = field(default_factory=dict)

    def go(self, action: str) -> bool:
        """Whether the action is allowed now; what it does."""
        is_open = self.state in OPEN_STATES
        match action, self.state:
            case "begin", _:
                self.num_lines = self.num_lines or NUM_LINES
                if self.state is BatchState.VALIDATING:
                    self.state = BatchState.IN_PROGRESS
            case "fail", BatchState.VALIDATING:
                self.state = BatchState.FAILED
            case "fail", BatchState.CANCELLING:
                self.state = BatchState.CANCELLED
            case "cancel", BatchState.VALIDATING | BatchState.IN_PROGRESS:
                self.state = BatchState.CANCELLING
            case "cancel", BatchState.CANCELLING | BatchState.CANCELLED:
                pass
            case "close", _:
                self.is_closed = True
                if self.state is BatchState.IN_PROGRESS:
                    self.state = BatchState.FINALIZING
            case "finish", BatchState.FINALIZING:
                is_whole = len(self.results) == self.num_lines
                self.state = BatchState.COMPLETED if is_whole else BatchState.EXPIRED
            case "finish", BatchState.CANCELLING:
                self.state = BatchState.CANCELLED
            case _:
                return False
        return is_open or action in {"begin", "close", "cancel"}


@pytest.mark.parametrize("seed", range(12))
def test_a_batch_does_what_the_model_does(database: Database, acme: Tenant, seed: int) -> None:
    draw, viewer, model = random.Random(seed), principal_of(acme), Model()
    with database.transaction(acme.id) as session:
        batch_id = make_batch(session, viewer)
    actions: dict[str, Callable[[TenantSession], object]] = {
        "begin": lambda session: service.begin(session, batch_id, NUM_LINES),
        "fail": lambda session: service.fail(session, batch_id, []),
        "cancel": lambda session: service.cancel(session, batch_id, viewer=viewer),
        "close": lambda session: service.close(session, batch_id),
        "finish": lambda session: service.finish(
            session,
            batch_id,
            counts=Counts(sum(model.results.values()), sum(not r for r in model.results.values())),
            output=None,
            errors=None,
        ),
    }
    weights = {"begin": 4, "fail": 1, "cancel": 1, "close": 1, "finish": 1}
    for _ in range(60):
        if draw.random() < 0.6:
            number, is_success = draw.randrange(NUM_LINES), draw.random() < 0.7
            result = Result(batch_id, number, is_success, b"{}")
            with database.statements(acme.id) as statements:
                is_new = service.add_result(statements, result)
            takes_results = model.state in OPEN_STATES and not model.is_closed
            assert is_new == (takes_results and number not in model.results)
            if is_new:
                model.results[number] = is_success
        else:
            (action,) = draw.choices(list(weights), list(weights.values()))
            try:
                with database.transaction(acme.id) as session:
                    actions[action](session)
                is_allowed = True
            except InvalidTransition:
                is_allowed = False
            assert model.go(action) == is_allowed, action
        with database.transaction(acme.id, read_only=True) as session:
            batch = service.get_batch(session, batch_id)
            assert batch.state is model.state
            assert (batch.ended_at is None) == (batch.state in OPEN_STATES)
            if batch.state in OPEN_STATES:
                assert service.list_answered(session, batch_id) == model.results.keys()
            elif batch.errors is None:
                assert sum(service.count_results(session, batch)) == len(model.results)


def test_every_state_is_reached_and_the_ends_are_final() -> None:
    reached = {BatchState.VALIDATING}.union(*TRANSITIONS.values())
    assert reached == set(BatchState)
    assert {state for state, after in TRANSITIONS.items() if after} == OPEN_STATES


def test_results_are_another_tenants_neither_to_read_nor_to_add(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        batch_id = make_batch(session, principal_of(acme))
        service.begin(session, batch_id, NUM_LINES)
    with database.statements(bolt.id) as statements:
        assert not service.add_result(statements, Result(batch_id, 0, True, b"{}"))
    with database.transaction(bolt.id) as session:
        assert service.list_answered(session, batch_id) == set()
        for ask in (service.get_batch, service.close):
            with pytest.raises(BatchNotFound):
                ask(session, batch_id)


def test_a_tenant_has_a_bounded_number_of_open_batches(
    database: Database, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_OPEN", 2)
    viewer = principal_of(acme)
    with database.transaction(acme.id) as session:
        first, _ = make_batch(session, viewer), make_batch(session, viewer)
        with pytest.raises(QuotaExceeded):
            make_batch(session, viewer)
        service.fail(session, first, [])
        make_batch(session, viewer)


@pytest.mark.parametrize(("name", "limit"), [("MAX_FILES", 2), ("MAX_TENANT_BYTES", 2)])
def test_a_tenant_has_a_bounded_number_of_files_and_bytes(
    database: Database,
    acme: Tenant,
    bolt: Tenant,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    limit: int,
) -> None:
    monkeypatch.setattr(files, name, limit)
    with database.transaction(acme.id) as session:
        first, _ = make_file(session), make_file(session)
        with pytest.raises(QuotaExceeded):
            make_file(session)
        files.remove(session, first.id, viewer=principal_of(acme))
        make_file(session)
    with database.transaction(bolt.id) as session:
        make_file(session)


def test_a_restricted_key_finds_its_own_files_only(database: Database, acme: Tenant) -> None:
    viewer = principal_of(acme, frozenset({"bot"}))
    with database.transaction(acme.id) as session:
        own, foreign = make_file(session), make_file(session, key_id="o" * 12)
        assert [file.id for file in files.list_files(session, viewer=viewer, limit=9)] == [own.id]
        with pytest.raises(FileNotFound):
            files.get_file(session, foreign.id, viewer=viewer)
