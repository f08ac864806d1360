"""Fine-tuning jobs: states, turns of the tenants, and tokens that count once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from decimal import ROUND_HALF_UP, Decimal

import pytest
from sqlalchemy import func, select

from loraplex.platform.base import utc_now
from loraplex.platform.batches import files
from loraplex.platform.batches.file_models import FilePurpose, StoredFile
from loraplex.platform.budgets import service as budgets
from loraplex.platform.budgets.models import BudgetAlert
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    BudgetExhausted,
    FileInUse,
    InsufficientQuota,
    InvalidTransition,
    InvalidValue,
    QuotaExceeded,
    TuningJobNotFound,
)
from loraplex.platform.keys.principal import ALL_SCOPES, Actor, ActorKind, Principal, Scope
from loraplex.platform.keys.service import ApiKeyService
from loraplex.platform.quotas import service as quotas
from loraplex.platform.quotas.holder import TENANT, Holder, key_holder, user_holder
from loraplex.platform.quotas.models import Period
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants import service as tenants
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.tuning import service
from loraplex.platform.tuning.models import TuningCheckpoint, TuningEvent, TuningJob
from loraplex.platform.tuning.service import Checkpoint, Happened, NewJob, Progress
from loraplex.platform.tuning.states import OPEN_STATES, TRANSITIONS, JobState, PauseReason
from loraplex.platform.usage import service as ledger
from loraplex.platform.usage.models import TrainingDay, UsageDay
from loraplex.platform.usage.service import Usage
from loraplex.platform.webhooks.event_types import EventType
from loraplex.platform.webhooks.models import WebhookDelivery
from loraplex.platform.webhooks.service import WebhookService
from loraplex.platform.webhooks.signing import SigningSecrets
from support.catalog import make_version
from support.databases import wait_until_are_blocked
from support.identity import peppers
from support.limits import limit
from support.money import UNIT, set_budget

SERVER, OTHER = "server-1", "server-2"


def principal_of(
    tenant: Tenant,
    adapters: frozenset[str] | None = None,
    *,
    user: str | None = None,
    key: str | None = "k" * 12,
) -> Principal:
    """A user's key, or one of a machine."""
    is_user = user is not None
    return Principal(
        tenant_id=tenant.id,
        tenant_slug=tenant.slug,
        actor=Actor(ActorKind.USER if is_user else ActorKind.KEY, user or str(key), "ci"),
        scopes=ALL_SCOPES,
        key_id=key,
        adapters=adapters,
    )


def make_file(session: TenantSession, purpose: FilePurpose = FilePurpose.FINE_TUNE) -> str:
    now = utc_now()
    file = StoredFile(
        id=files.new_file_id(),
        key_id="k" * 12,
        purpose=purpose,
        filename="data.jsonl",
        size_bytes=1,
        sha256="0" * 64,
        created_at=now,
        expires_at=now.replace(year=now.year + 1),
    )
    files.add_upload(session, file)
    return file.id


def make_job(
    session: TenantSession,
    tenant: Tenant,
    *,
    file_id: str | None = None,
    token_price: int = 0,
    by: Principal | None = None,
) -> str:
    new = NewJob(
        adapter_name="bot",
        training_file_id=file_id or make_file(session),
        validation_file_id=None,
        recipe={"method": "supervised"},
        labels=None,
        created_by="key:ci",
        token_price=token_price,
    )
    return service.create(session, new, by or principal_of(tenant)).id


def sum_of_usage(session: TenantSession) -> int:
    return session.scalar(select(func.sum(UsageDay.trained_tokens))) or 0


def state_of(session: TenantSession, job_id: str) -> JobState:
    return service.get_job(session, job_id).state


def reach(session: TenantSession, job_id: str, state: JobState, viewer: Principal) -> None:
    """Bring a queued job into an open state, or end it."""
    if state is JobState.PAUSED:
        service.pause(session, job_id, viewer=viewer)
    elif state is JobState.CANCELLED:
        service.cancel(session, job_id, viewer=viewer)
    elif state is not JobState.QUEUED:
        service.begin(session, job_id, SERVER)
        if state is JobState.FAILED:
            service.fail(session, job_id, code="training_failed", message="It failed.")


@pytest.mark.parametrize("state", [each for each in JobState if each is not JobState.SUCCEEDED])
def test_callers_change_the_state_as_the_table_says(
    database: Database, acme: Tenant, state: JobState
) -> None:
    viewer = principal_of(acme)
    ways: dict[JobState, Callable[..., tuple[TuningJob, bool]]] = {
        JobState.CANCELLED: service.cancel,
        JobState.PAUSED: service.pause,
    }
    for target, change in ways.items():
        with database.transaction(acme.id) as session:
            job_id = make_job(session, acme)
            reach(session, job_id, state, viewer)
            if target is state:
                assert change(session, job_id, viewer=viewer)[1] is False
            elif target in TRANSITIONS[state]:
                job, is_new = change(session, job_id, viewer=viewer)
                assert (job.state, is_new) == (target, True)
                assert (job.ended_at is None) == (target in OPEN_STATES)
            else:
                with pytest.raises(InvalidTransition):
                    change(session, job_id, viewer=viewer)


def test_a_paused_job_is_not_begun_and_a_resumed_one_is(database: Database, acme: Tenant) -> None:
    viewer = principal_of(acme)
    with database.transaction(acme.id) as session:
        job_id = make_job(session, acme)
        service.pause(session, job_id, viewer=viewer)
        assert service.begin(session, job_id, SERVER).state is JobState.PAUSED
        assert service.resume(session, job_id, viewer=viewer)[1] is True
        assert service.resume(session, job_id, viewer=viewer)[1] is False
        assert service.begin(session, job_id, SERVER).state is JobState.RUNNING


def test_a_job_that_is_published_is_neither_paused_nor_cancelled(
    database: Database, acme: Tenant
) -> None:
    viewer = principal_of(acme)
    with database.transaction(acme.id) as session:
        job_id = make_job(session, acme)
        service.begin(session, job_id, SERVER)
        service.close(session, job_id)
        for change in (service.pause, service.cancel):
            with pytest.raises(InvalidTransition):
                change(session, job_id, viewer=viewer)
        assert service.begin(session, job_id, OTHER).finalizing_at is None, "trained anew"
        service.cancel(session, job_id, viewer=viewer)


def test_a_deleted_tenants_jobs_end_but_for_one_that_is_published(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        jobs = {state: make_job(session, acme) for state in OPEN_STATES}
        for state, job_id in jobs.items():
            reach(session, job_id, state, principal_of(acme))
        published = make_job(session, acme)
        service.begin(session, published, SERVER)
        service.close(session, published)
        service.cancel_all(session)
        assert {state_of(session, job_id) for job_id in jobs.values()} == {JobState.CANCELLED}
        assert state_of(session, published) is JobState.RUNNING
        assert service.has_open(session)
        service.fail(session, published, code="training_failed", message="It failed.")
        assert not service.has_open(session)


def test_a_failure_after_a_cancellation_changes_nothing(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        job_id = make_job(session, acme)
        service.begin(session, job_id, SERVER)
        service.cancel(session, job_id, viewer=principal_of(acme))
        job = service.fail(session, job_id, code="training_failed", message="It failed.")
        assert (job.state, job.error_code) == (JobState.CANCELLED, None)


def test_another_tenant_and_a_key_for_other_adapters_find_no_job(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        job_id = make_job(session, acme)
        narrow = principal_of(acme, frozenset({"other"}))
        with pytest.raises(TuningJobNotFound):
            service.get_job(session, job_id, viewer=narrow)
        assert list(service.list_jobs(session, viewer=narrow, after=None, limit=9)) == []
    with database.transaction(bolt.id) as session, pytest.raises(TuningJobNotFound):
        service.get_job(session, job_id, viewer=principal_of(bolt))


def test_a_file_of_another_purpose_is_refused_and_one_in_use_stays(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        with pytest.raises(InvalidValue):
            make_job(session, acme, file_id=make_file(session, FilePurpose.BATCH))
        file_id = make_file(session)
        service.check_file_unused(session, file_id)
        job_id = make_job(session, acme, file_id=file_id)
        with pytest.raises(FileInUse):
            service.check_file_unused(session, file_id)
    with database.platform_transaction() as platform:
        assert service.list_needed_files_of_all_tenants(platform) == {file_id}
    with database.transaction(acme.id) as session:
        service.cancel(session, job_id, viewer=principal_of(acme))
        service.check_file_unused(session, file_id)


def test_a_tenant_has_a_limited_number_of_open_jobs(
    database: Database, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_OPEN", 2)
    with database.transaction(acme.id) as session:
        first = make_job(session, acme)
        make_job(session, acme)
        with pytest.raises(QuotaExceeded):
            make_job(session, acme)
        service.cancel(session, first, viewer=principal_of(acme))
        make_job(session, acme)


def test_the_next_turn_is_of_the_tenant_that_was_served_the_longest_ago(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    jobs: dict[str, list[str]] = {}
    for tenant in (acme, bolt):
        with database.transaction(tenant.id) as session:
            jobs[tenant.slug] = [make_job(session, tenant) for _ in range(3)]
    order = []
    for _ in range(6):
        with database.platform_transaction() as platform:
            turn = service.list_turns_of_all_tenants(platform)[0]
        order.append((turn.tenant_slug, turn.job_id))
        with database.transaction(turn.tenant_id) as session:
            service.begin(session, turn.job_id, SERVER)
            service.fail(session, turn.job_id, code="training_failed", message="It failed.")
    expected = [
        (slug, job)
        for pair in zip(*jobs.values(), strict=True)
        for slug, job in zip(jobs, pair, strict=True)
    ]
    assert order == expected


def test_a_job_that_was_begun_comes_first_and_a_suspended_tenant_never(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    for tenant in (acme, bolt):
        with database.transaction(tenant.id) as session:
            job_id = make_job(session, tenant)
    with database.transaction(bolt.id) as session:
        service.begin(session, job_id, SERVER)
    with database.platform_transaction() as platform:
        turns = service.list_turns_of_all_tenants(platform)
        assert [turn.tenant_slug for turn in turns] == [bolt.slug, acme.slug]
        assert (turns[0].server_id, turns[1].server_id) == (SERVER, None)
        assert service.list_kept_of_all_tenants(platform, SERVER) == {job_id}
        assert service.list_kept_of_all_tenants(platform, OTHER) == set()
        tenants.set_suspended(platform.get_one(Tenant, bolt.id), is_suspended=True)
    with database.platform_transaction() as platform:
        turns = service.list_turns_of_all_tenants(platform)
    assert [turn.tenant_slug for turn in turns] == [acme.slug]


@pytest.mark.parametrize("seed", range(5))
def test_repeated_reports_charge_each_token_once(
    database: Database, acme: Tenant, seed: int
) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 50) for _ in range(20)]
    with database.transaction(acme.id) as session:
        job_id = make_job(session, acme)
        for _ in range(30):
            step = rng.randint(0, len(sizes))
            service.record(session, job_id, Progress(step, sum(sizes[:step]), len(sizes)))
            job = service.get_job(session, job_id)
            assert job.num_tokens == sum(sizes[: job.step]) == sum_of_usage(session)


def test_events_and_checkpoints_are_bounded_and_the_newest_stay(
    database: Database, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_EVENTS", 5)
    monkeypatch.setattr(service, "MAX_CHECKPOINTS", 3)
    with database.transaction(acme.id) as session:
        job_id = make_job(session, acme)
        for step in range(1, 9):
            progress = Progress(step, step, 8)
            progress.events.append(Happened(f"step {step}", data={"step": step}))
            progress.checkpoints += [Checkpoint(step, 0.5, None, None, None)] * 2
            service.record(session, job_id, progress)
        events = service.list_events(session, job_id, after=None, limit=100)
        assert [event.message for event in events] == [f"step {n}" for n in (8, 7, 6, 5, 4)]
        rest = service.list_events(session, job_id, after=events[1].id, limit=2)
        assert [event.message for event in rest] == ["step 6", "step 5"]
        checkpoints = service.list_checkpoints(session, job_id, after=None, limit=100)
        assert [checkpoint.step for checkpoint in checkpoints] == [8, 7, 6]


def test_jobs_that_ended_long_ago_are_purged_with_what_happened_in_them(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    kept, removed = {}, []
    for tenant in (acme, bolt):
        with database.transaction(tenant.id) as session:
            kept[tenant.id] = [make_job(session, tenant) for _ in range(2)]
            removed.append(make_job(session, tenant))
            for job_id in (kept[tenant.id][0], removed[-1]):
                service.begin(session, job_id, SERVER)
                service.record(
                    session,
                    job_id,
                    Progress(1, 5, 9, checkpoints=[Checkpoint(1, None, None, None, None)]),
                )
                service.cancel(session, job_id, viewer=principal_of(tenant))
            service.get_job(session, removed[-1]).ended_at = utc_now() - timedelta(days=8)
    with database.platform_transaction() as session:
        before = utc_now() - timedelta(days=7)
        assert [service.purge(session, before, limit=1) for _ in range(3)] == [1, 1, 0]
    for tenant in (acme, bolt):
        with database.transaction(tenant.id) as session:
            assert set(session.scalars(select(TuningJob.id))) == set(kept[tenant.id])
            assert set(session.scalars(select(TuningEvent.job_id))) == set(kept[tenant.id])
            assert set(session.scalars(select(TuningCheckpoint.job_id))) == {kept[tenant.id][0]}
            assert sum_of_usage(session) == 10, "what was charged stays"


def test_a_deleted_adapters_jobs_go_but_those_that_are_open(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(bolt.id) as session:
        foreign = make_job(session, bolt)
        service.cancel(session, foreign, viewer=principal_of(bolt))
    with database.transaction(acme.id) as session:
        is_open, has_ended = make_job(session, acme), make_job(session, acme)
        service.cancel(session, has_ended, viewer=principal_of(acme))
        assert service.remove_ended(session, "other") == 0
        assert service.remove_ended(session, "bot") == 1
        assert session.scalars(select(TuningJob.id)).all() == [is_open]
        assert set(session.scalars(select(TuningEvent.job_id))) == {is_open}
    with database.transaction(bolt.id) as session:
        assert service.get_job(session, foreign).ended_at is not None


def test_success_names_the_version_and_both_ends_are_announced(
    database: Database, acme: Tenant
) -> None:
    webhooks = WebhookService(SigningSecrets([b"a" * 32]))
    with database.transaction(acme.id) as session:
        webhooks.create(
            session,
            url="https://hooks.example.com/",
            events=[EventType.JOB_SUCCEEDED, EventType.JOB_FAILED],
            description=None,
            created_by="key:test",
        )
        good, bad = make_job(session, acme), make_job(session, acme)
        version = make_version(session, "bot")
        service.begin(session, good, SERVER)
        job = service.succeed(session, good, version=1, base_id="base")
        assert (job.state, job.version) == (JobState.SUCCEEDED, 1)
        assert version.lineage is not None
        assert (version.lineage["job"], version.lineage["base_id"]) == (good, "base")
        service.begin(session, bad, SERVER)
        service.fail(session, bad, code="out_of_memory", message="Too large.")
    with database.transaction(acme.id, read_only=True) as session:
        bodies = session.scalars(select(WebhookDelivery.body)).all()
    told = {event["type"]: event["data"] for event in map(json.loads, bodies)}
    assert told == {
        "job.succeeded": {
            "job": good,
            "adapter": "bot",
            "version": 1,
            "trained_tokens": 0,
            "error": None,
        },
        "job.failed": {
            "job": bad,
            "adapter": "bot",
            "version": None,
            "trained_tokens": 0,
            "error": "out_of_memory",
        },
    }


def test_pauses_and_their_reasons_are_announced_once(database: Database, acme: Tenant) -> None:
    webhooks, viewer = WebhookService(SigningSecrets([b"a" * 32])), principal_of(acme)
    with database.transaction(acme.id) as session:
        webhooks.create(
            session,
            url="https://hooks.example.com/",
            events=[EventType.JOB_PAUSED, EventType.JOB_RESUMED],
            description=None,
            created_by="key:test",
        )
        job = make_job(session, acme)
        for _ in range(2):
            service.pause(session, job, viewer=viewer)
        for _ in range(2):
            service.resume(session, job, viewer=viewer)
        service.begin(session, job, SERVER)
    limit(database, acme.id, trained_tokens_per_period=100)
    with database.transaction(acme.id) as session:
        train(session, job, step=1, num_tokens=130)
    with database.transaction(acme.id, read_only=True) as session:
        bodies = session.scalars(select(WebhookDelivery.body)).all()
    told = [(event["type"], event["data"]) for event in map(json.loads, bodies)]
    known = {"job": job, "adapter": "bot", "trained_tokens": 0}
    expected = [
        ("job.paused", {**known, "reason": "requested"}),
        ("job.resumed", known),
        ("job.paused", {**known, "trained_tokens": 130, "reason": "trained_tokens"}),
    ]
    assert sorted(told, key=str) == sorted(expected, key=str)


# --- the limit on trained tokens ------------------------------------------------------------------


def train(session: TenantSession, job_id: str, *, step: int, num_tokens: int) -> JobState:
    """Report these totals of a job with ten steps; returns its state."""
    progress = Progress(step=step, num_tokens=num_tokens, num_steps=10)
    return service.record(session, job_id, progress).state


def test_a_job_is_paused_when_the_tenant_has_no_tokens_left_to_train_on(
    database: Database, acme: Tenant
) -> None:
    limit(database, acme.id, trained_tokens_per_period=100)
    with database.transaction(acme.id) as session:
        job = make_job(session, acme)
        service.begin(session, job, SERVER)
        assert train(session, job, step=1, num_tokens=99) is JobState.RUNNING
        assert train(session, job, step=2, num_tokens=130) is JobState.PAUSED
        events = service.list_events(session, job, after=None, limit=1)
        assert (events[0].level, "used up" in events[0].message) == ("warn", True)
        use = quotas.current_use(session).uses["trained_tokens_per_period"]
        assert (use.limit, use.used, use.remaining) == (100, 130, 0)


def test_without_tokens_left_no_job_is_created_or_resumed_until_the_limit_is_raised(
    database: Database, acme: Tenant
) -> None:
    limit(database, acme.id, trained_tokens_per_period=100)
    with database.transaction(acme.id) as session:
        job, waiting = make_job(session, acme), make_job(session, acme)
        service.begin(session, job, SERVER)
        train(session, job, step=1, num_tokens=100)
        with pytest.raises(InsufficientQuota, match="100 trained tokens a month"):
            make_job(session, acme)
        with pytest.raises(InsufficientQuota):
            service.resume(session, job, viewer=principal_of(acme))
        assert service.begin(session, waiting, SERVER).state is JobState.PAUSED
    limit(database, acme.id, trained_tokens_per_period=101)
    with database.transaction(acme.id) as session:
        service.resume(session, job, viewer=principal_of(acme))
        assert service.begin(session, job, SERVER).state is JobState.RUNNING
        make_job(session, acme)


def test_a_job_whose_last_step_used_the_last_tokens_ends_with_its_result(
    database: Database, acme: Tenant
) -> None:
    limit(database, acme.id, trained_tokens_per_period=100)
    with database.transaction(acme.id) as session:
        job = make_job(session, acme)
        service.begin(session, job, SERVER)
        assert train(session, job, step=10, num_tokens=500) is JobState.RUNNING
        assert service.close(session, job).finalizing_at is not None


def test_a_tenant_with_a_limit_of_zero_trains_nothing(database: Database, acme: Tenant) -> None:
    limit(database, acme.id, trained_tokens_per_period=0)
    with database.transaction(acme.id) as session, pytest.raises(InsufficientQuota):
        make_job(session, acme)


def test_the_limit_counts_the_present_period_and_no_other_tenants_tokens(
    database: Database, acme: Tenant
) -> None:
    yesterday = utc_now().date() - timedelta(days=1)
    with database.platform_transaction() as session:
        globex = tenants.create_tenant(session, "globex")
    for tenant in (acme, globex):
        limit(database, tenant.id, trained_tokens_per_period=100, period=Period.DAY)
    with database.transaction(acme.id) as session:
        day = UsageDay.begin(yesterday, "bot", 0)
        day.trained_tokens = 100
        session.add(day)
        session.flush()
        job = make_job(session, acme)
        service.begin(session, job, SERVER)
        assert train(session, job, step=1, num_tokens=100) is JobState.PAUSED
    with database.transaction(globex.id) as session:
        make_job(session, globex)


# --- what training costs --------------------------------------------------------------------------


def amounts(session: TenantSession) -> int:
    return session.scalar(select(func.sum(UsageDay.amount))) or 0


def test_the_steps_of_a_job_cost_together_what_its_tokens_cost_whatever_the_reports(
    database: Database, acme: Tenant
) -> None:
    """A price at which each report alone would be rounded."""
    draw = random.Random(3)
    price = 1_234_567
    with database.transaction(acme.id) as session:
        job = make_job(session, acme, token_price=price)
        service.begin(session, job, SERVER)
        total = 0
        for step in range(1, 10):
            total += draw.randrange(1, 5)
            for _ in range(2):  # a repeated report costs nothing
                train(session, job, step=step, num_tokens=total)
            exact = Decimal(price * total) / 1_000_000
            assert amounts(session) == exact.quantize(Decimal(1), ROUND_HALF_UP)


def test_a_job_without_a_price_costs_nothing(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        job = make_job(session, acme)
        service.begin(session, job, SERVER)
        train(session, job, step=1, num_tokens=10**6)
        assert (amounts(session), sum_of_usage(session)) == (0, 10**6)


# --- budgets of money -----------------------------------------------------------------------------


PRICE = 10**6 * UNIT
"""A token costs one unit."""


def spent(session: TenantSession, holder: Holder | None = None) -> list[int]:
    """What was spent of each budget, of this holder if one is named."""
    return [each.spent for each in budgets.list_spendings(session, holder)]


def reason_of(session: TenantSession, job_id: str) -> tuple[JobState, str | None]:
    job = service.get_job(session, job_id)
    return job.state, job.pause_reason


def wait_for_budget(session: TenantSession, tenant: Tenant) -> str:
    """A job that has used up the tenant's budget of 100 units."""
    job = make_job(session, tenant, token_price=PRICE)
    service.begin(session, job, SERVER)
    train(session, job, step=1, num_tokens=100)
    assert reason_of(session, job) == (JobState.PAUSED, "budget")
    return job


def test_steps_spend_the_tenants_budgets_and_make_its_alerts(
    database: Database, acme: Tenant
) -> None:
    for period in Period:
        set_budget(database, acme.id, 100 * UNIT, period=period, alerts=(50, 80))
    with database.transaction(acme.id) as session:
        job = make_job(session, acme, token_price=PRICE)
        service.begin(session, job, SERVER)
        for num_tokens in (49, 50, 50, 79):
            assert train(session, job, step=1, num_tokens=num_tokens) is JobState.RUNNING
        assert spent(session) == [79 * UNIT] * 2
        alerts = session.execute(select(BudgetAlert.percent, BudgetAlert.spent)).all()
        assert alerts == [(50, 50 * UNIT)] * 2


def test_a_job_whose_tenants_budget_is_exhausted_is_paused_and_says_so(
    database: Database, acme: Tenant
) -> None:
    set_budget(database, acme.id, 100 * UNIT, period=Period.DAY)
    with database.transaction(acme.id) as session:
        job, waiting, free = (
            make_job(session, acme, token_price=price) for price in (PRICE, PRICE, 0)
        )
        service.begin(session, job, SERVER)
        assert train(session, job, step=1, num_tokens=99) is JobState.RUNNING
        assert train(session, job, step=2, num_tokens=130) is JobState.PAUSED
        service.begin(session, waiting, SERVER)
        for each in (job, waiting):
            assert reason_of(session, each) == (JobState.PAUSED, PauseReason.BUDGET)
            (event,) = service.list_events(session, each, after=None, limit=1)
            assert (event.level, "budget is exhausted" in event.message) == ("warn", True)
        assert spent(session) == [130 * UNIT]
        assert service.begin(session, free, SERVER).state is JobState.RUNNING
        assert train(session, free, step=1, num_tokens=10**6) is JobState.RUNNING


def test_a_job_whose_last_step_exhausted_the_budget_ends_with_its_result(
    database: Database, acme: Tenant
) -> None:
    set_budget(database, acme.id, 100 * UNIT)
    with database.transaction(acme.id) as session:
        job = make_job(session, acme, token_price=PRICE)
        service.begin(session, job, SERVER)
        assert train(session, job, step=10, num_tokens=500) is JobState.RUNNING
        assert service.close(session, job).finalizing_at is not None


def test_with_an_exhausted_budget_only_free_jobs_are_created_and_resumed(
    database: Database, acme: Tenant
) -> None:
    viewer = principal_of(acme)
    set_budget(database, acme.id, 100 * UNIT)
    with database.transaction(acme.id) as session:
        job, free = wait_for_budget(session, acme), make_job(session, acme)
        with pytest.raises(BudgetExhausted, match=r"100\.00 a month, and nothing is left"):
            make_job(session, acme, token_price=PRICE)
        with pytest.raises(BudgetExhausted):
            service.resume(session, job, viewer=viewer)
        service.pause(session, free, viewer=viewer)
        assert service.resume(session, free, viewer=viewer)[0].state is JobState.QUEUED


def test_a_job_goes_on_by_itself_when_the_budget_allows_it(
    database: Database, acme: Tenant
) -> None:
    set_budget(database, acme.id, 100 * UNIT)
    with database.transaction(acme.id) as session:
        job = wait_for_budget(session, acme)
        own = make_job(session, acme)
        service.pause(session, own, viewer=principal_of(acme))
        assert service.resume_within_budget(session) == 0
    with database.platform_transaction(read_only=True) as everyone:
        assert service.list_waiting_for_budget_of_all_tenants(everyone) == [acme.id]
        assert service.list_turns_of_all_tenants(everyone) == []
    set_budget(database, acme.id, 101 * UNIT)
    with database.transaction(acme.id) as session:
        assert service.resume_within_budget(session) == 1
        assert reason_of(session, job) == (JobState.QUEUED, None)
        assert reason_of(session, own) == (JobState.PAUSED, "requested")
        assert service.begin(session, job, SERVER).state is JobState.RUNNING
    with database.platform_transaction(read_only=True) as everyone:
        assert service.list_waiting_for_budget_of_all_tenants(everyone) == []


def test_a_job_that_waits_for_a_budget_and_is_paused_by_its_owner_does_not_go_on_by_itself(
    database: Database, acme: Tenant
) -> None:
    viewer = principal_of(acme)
    set_budget(database, acme.id, 100 * UNIT)
    with database.transaction(acme.id) as session:
        job = wait_for_budget(session, acme)
        assert [service.pause(session, job, viewer=viewer)[1] for _ in range(2)] == [True, False]
        assert reason_of(session, job) == (JobState.PAUSED, PauseReason.REQUESTED)
    set_budget(database, acme.id, 200 * UNIT)
    with database.transaction(acme.id) as session:
        assert service.resume_within_budget(session) == 0
        assert service.resume(session, job, viewer=viewer)[0].pause_reason is None


def test_a_budget_that_is_set_later_counts_what_was_trained_in_its_period(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        day = UsageDay.begin(utc_now().date() - timedelta(days=32), "bot", 0)
        day.amount = 7 * UNIT
        session.add(day)
        session.flush()
        job = make_job(session, acme, token_price=PRICE)
        service.begin(session, job, SERVER)
        train(session, job, step=1, num_tokens=60)
    record_request(database, acme, "a", 3 * UNIT)
    for period in Period:
        set_budget(database, acme.id, 100 * UNIT, period=period)
    with database.transaction(acme.id) as session:
        assert spent(session) == [63 * UNIT] * 2


def record_request(
    database: Database,
    tenant: Tenant,
    request_id: str,
    amount: int,
    *,
    user: str | None = None,
    key: str | None = None,
) -> None:
    usage = Usage(
        request_id=request_id,
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=1,
        finish_reason="stop",
        price_id=1,
        amount=amount,
        user_id=user,
        key_id=key,
    )
    with database.statements(tenant.id) as session:
        ledger.record(session, usage)


@pytest.mark.parametrize(
    ("holder", "is_first"),
    [
        *((TENANT, True), (key_holder("laptop"), False)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((TENANT, False), (user_holder("ada"), True))
        ),
    ],
)
def test_a_budget_is_exact_when_jobs_and_requests_spend_it_while_it_is_set(
    database: Database, acme: Tenant, holder: Holder, *, is_first: bool
) -> None:
    """`is_first`: the tenant has no limits before. Each report alone would be rounded."""
    if not is_first:
        set_budget(database, acme.id, UNIT)
    with database.transaction(acme.id) as session:
        ada = principal_of(acme, user="ada", key="laptop")
        job = make_job(session, acme, token_price=1_234_567, by=ada)
        service.begin(session, job, SERVER)

    def steps() -> None:
        for number in range(1, 21):
            with database.transaction(acme.id) as session:
                train(session, job, step=1, num_tokens=3 * number)

    def requests() -> None:
        for number in range(20):
            record_request(database, acme, f"r{number}", 1, user="ada", key="laptop")

    def limits() -> None:
        for number in range(5):
            set_budget(database, acme.id, (2 + number) * UNIT, holder=holder)

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(each) for each in (steps, requests, limits)]:
            future.result(timeout=60)
    with database.transaction(acme.id) as session:
        assert spent(session, holder) == [amounts(session)] == [20 + 74]  # 60 tokens cost 74.07
        assert sums_of_callers(session) == {("ada", "laptop"): (60, 74)}


# --- budgets of users and keys --------------------------------------------------------------------


ADA, LAPTOP, PHONE = "ada", "laptop", "phone"


def sums_of_callers(session: TenantSession) -> dict[tuple[str, str], tuple[int, int]]:
    """The trained tokens and the amount of each user and key."""
    return {
        (row.user_id, row.key_id): (row.trained_tokens, row.amount)
        for row in session.scalars(select(TrainingDay))
    }


@pytest.mark.parametrize(
    ("holder", "whose"), [(user_holder(ADA), "the user's"), (key_holder(LAPTOP), "the key's")]
)
def test_a_budget_of_a_user_or_key_pauses_the_jobs_that_they_created_and_no_others(
    database: Database, acme: Tenant, holder: Holder, whose: str
) -> None:
    ada = principal_of(acme, user=ADA, key=LAPTOP)
    other = principal_of(acme, user="bob", key=PHONE)
    set_budget(database, acme.id, 100 * UNIT, holder=holder, alerts=(50,))
    with database.transaction(acme.id) as session:
        job, waiting, free = (
            make_job(session, acme, token_price=price, by=ada) for price in (PRICE, PRICE, 0)
        )
        service.begin(session, job, SERVER)
        assert train(session, job, step=1, num_tokens=99) is JobState.RUNNING
        assert train(session, job, step=2, num_tokens=130) is JobState.PAUSED
        service.begin(session, waiting, SERVER)
        for each in (job, waiting):
            assert reason_of(session, each) == (JobState.PAUSED, PauseReason.BUDGET)
            (event,) = service.list_events(session, each, after=None, limit=1)
            assert f"{whose} budget is exhausted" in event.message
        with pytest.raises(BudgetExhausted, match=f"{whose.capitalize()} budget is 100.00 a month"):
            make_job(session, acme, token_price=PRICE, by=ada)
        with pytest.raises(BudgetExhausted):
            service.resume(session, job, viewer=other)  # the job's budgets, not the caller's
        assert service.begin(session, free, SERVER).state is JobState.RUNNING
        others = make_job(session, acme, token_price=PRICE, by=other)
        assert service.begin(session, others, SERVER).state is JobState.RUNNING
        assert train(session, others, step=1, num_tokens=1000) is JobState.RUNNING
        assert spent(session) == [130 * UNIT]
        alert = session.execute(select(BudgetAlert.holder, BudgetAlert.spent)).one()
        assert alert == (holder, 99 * UNIT)
        assert sums_of_callers(session) == {
            (ADA, LAPTOP): (130, 130 * UNIT),
            ("bob", PHONE): (1000, 1000 * UNIT),
        }


def test_a_users_budget_counts_the_jobs_of_all_keys_and_of_the_console(
    database: Database, acme: Tenant
) -> None:
    set_budget(database, acme.id, 100 * UNIT, holder=user_holder(ADA))
    with database.transaction(acme.id) as session:
        for key in (LAPTOP, PHONE, None):
            ada = principal_of(acme, user=ADA, key=key)
            job = make_job(session, acme, token_price=PRICE, by=ada)
            service.begin(session, job, SERVER)
            train(session, job, step=1, num_tokens=20)
        assert spent(session) == [60 * UNIT]


def test_each_waiting_job_goes_on_by_itself_when_its_own_budgets_allow_it(
    database: Database, acme: Tenant
) -> None:
    holders = {key: key_holder(key) for key in (LAPTOP, PHONE)}
    for holder in holders.values():
        set_budget(database, acme.id, 100 * UNIT, holder=holder)
    with database.transaction(acme.id) as session:
        jobs = {}
        for key in holders:
            by = principal_of(acme, key=key)
            jobs[key] = make_job(session, acme, token_price=PRICE, by=by)
            service.begin(session, jobs[key], SERVER)
            assert train(session, jobs[key], step=1, num_tokens=100) is JobState.PAUSED
        assert not service.may_resume_within_budget(session)
        assert service.resume_within_budget(session) == 0
    set_budget(database, acme.id, 101 * UNIT, holder=holders[PHONE])
    with database.transaction(acme.id) as session:
        assert service.may_resume_within_budget(session)
        assert service.resume_within_budget(session) == 1
        assert reason_of(session, jobs[LAPTOP]) == (JobState.PAUSED, "budget")
        assert reason_of(session, jobs[PHONE]) == (JobState.QUEUED, None)


@pytest.mark.parametrize("holder", [user_holder(ADA), key_holder(LAPTOP)])
def test_a_budget_of_a_user_or_key_that_is_set_later_counts_their_training_in_its_period(
    database: Database, acme: Tenant, holder: Holder
) -> None:
    ada = principal_of(acme, user=ADA, key=LAPTOP)
    callers = {(ADA, LAPTOP): 7, ("bob", PHONE): 11}
    with database.transaction(acme.id) as session:
        for (user, key), amount in callers.items():
            day = utc_now().date() - timedelta(days=32)
            row = {"day": day, "user_id": user, "key_id": key, "trained_tokens": 1}
            session.add(TrainingDay(**row, amount=amount * UNIT))
        session.flush()
        for by in (ada, principal_of(acme, user="bob", key=PHONE)):
            job = make_job(session, acme, token_price=PRICE, by=by)
            service.begin(session, job, SERVER)
            train(session, job, step=1, num_tokens=60)
    record_request(database, acme, "a", 3 * UNIT, user=ADA, key=LAPTOP)
    for period in Period:
        set_budget(database, acme.id, 100 * UNIT, period=period, holder=holder)
    with database.transaction(acme.id) as session:
        assert spent(session) == [63 * UNIT] * 2


def test_a_rotated_keys_jobs_are_charged_to_its_successor(database: Database, acme: Tenant) -> None:
    keys, admin = ApiKeyService(peppers("secret")), principal_of(acme, user=ADA, key=None)
    with database.transaction(acme.id) as session:
        old = keys.issue(session, name="ci", scopes=[Scope.INFER]).key.id
    set_budget(database, acme.id, 100 * UNIT, holder=key_holder(old))
    with database.transaction(acme.id) as session:
        by = principal_of(acme, key=old)
        ended, job = (make_job(session, acme, token_price=PRICE, by=by) for _ in range(2))
        service.cancel(session, ended, viewer=by)
        service.begin(session, job, SERVER)
        train(session, job, step=1, num_tokens=60)
        new = keys.rotate(session, old, overlap=timedelta(), issuer=admin).key.id
        assert train(session, job, step=2, num_tokens=100) is JobState.PAUSED
        assert spent(session, key_holder(old)) == [60 * UNIT]
        assert spent(session, key_holder(new)) == [100 * UNIT]
        assert service.get_job(session, ended).key_id == old
    set_budget(database, acme.id, 101 * UNIT, holder=key_holder(new))
    with database.transaction(acme.id) as session:
        assert service.resume_within_budget(session) == 1


def test_a_key_is_rotated_while_its_job_reports_steps_and_every_token_is_charged_once(
    database: Database, acme: Tenant
) -> None:
    keys, admin = ApiKeyService(peppers("secret")), principal_of(acme, user=ADA, key=None)
    limit(database, acme.id, keys=10)
    with database.transaction(acme.id) as session:
        chain = [keys.issue(session, name="ci", scopes=[Scope.INFER]).key.id]
        job = make_job(session, acme, token_price=PRICE, by=principal_of(acme, key=chain[0]))
        service.begin(session, job, SERVER)
    set_budget(database, acme.id, 10**6 * UNIT, holder=key_holder(chain[0]))

    def steps() -> None:
        for number in range(1, 21):
            with database.transaction(acme.id) as session:
                train(session, job, step=1, num_tokens=number)

    def rotations() -> None:
        for _ in range(5):
            with database.transaction(acme.id) as session:
                overlap = timedelta(hours=1)
                issued = keys.rotate(session, chain[-1], overlap=overlap, issuer=admin)
            chain.append(issued.key.id)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(each) for each in (steps, rotations)]:
            future.result(timeout=60)
    with database.transaction(acme.id) as session:
        assert spent(session, key_holder(chain[-1])) == [20 * UNIT]
        sums = sums_of_callers(session)
        assert sum(tokens for tokens, _ in sums.values()) == 20
        assert {user for user, _ in sums} == {""}
        assert {key for _, key in sums} <= set(chain)


def test_a_key_is_rotated_while_its_waiting_jobs_are_resumed(
    database: Database, acme: Tenant
) -> None:
    """Both lock the jobs: in one order, or they wait for each other."""
    keys, admin = ApiKeyService(peppers("secret")), principal_of(acme, user=ADA, key=None)
    with database.transaction(acme.id) as session:
        key = keys.issue(session, name="ci", scopes=[Scope.INFER]).key.id
    set_budget(database, acme.id, 100 * UNIT, holder=key_holder(key))
    with database.transaction(acme.id) as session:
        by = principal_of(acme, key=key)
        last, first = sorted(make_job(session, acme, token_price=PRICE, by=by) for _ in range(2))
        service.get_job(session, first).created_at -= timedelta(hours=1)
        service.begin(session, first, SERVER)
        train(session, first, step=1, num_tokens=100)
        service.begin(session, last, SERVER)
        for job in (first, last):
            assert reason_of(session, job) == (JobState.PAUSED, "budget")

    def resume() -> int:
        with database.transaction(acme.id) as session:
            return service.resume_within_budget(session)

    def rotate() -> str:
        with database.transaction(acme.id) as session:
            return keys.rotate(session, key, overlap=timedelta(), issuer=admin).key.id

    with ThreadPoolExecutor(2) as threads:
        with database.transaction(acme.id) as session:
            service.get_job(session, first, is_locked=True)
            resuming = threads.submit(resume)
            wait_until_are_blocked(session, 1)
            rotating = threads.submit(rotate)
            wait_until_are_blocked(session, 2)
        assert resuming.result(timeout=60) == 0
        successor = rotating.result(timeout=60)
    with database.transaction(acme.id) as session:
        assert {service.get_job(session, job).key_id for job in (first, last)} == {successor}
