"""`/v1/fine_tuning/jobs` through the unmodified openai client, with a trainer without a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from openai import (
    BadRequestError,
    ConflictError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
)
from openai.types.fine_tuning import FineTuningJob
from sqlalchemy import select

from loraplex.adapters.logs import LOG_VARIABLES
from loraplex.api.inference.pricing import REUSE_SECONDS
from loraplex.platform.base import utc_now
from loraplex.platform.models import AuditEntry, StoredFile
from loraplex.platform.quotas.holder import TENANT, key_holder
from support.envelopes import check_envelope
from support.limits import limit
from support.money import UNIT, set_budget, set_price
from support.server import Caller, ServerUnderTest
from support.tuning_jobs import (
    create,
    ended,
    examples,
    messages,
    num_tokens,
    trained_tokens,
    trainers,
    upload,
)
from support.waiting import wait_for


def folder(server: ServerUnderTest, job_id: str) -> Path:
    return server.settings.data_dir / "tuning" / job_id


def trainer_memories(caller: Caller) -> list[dict[str, Any]]:
    (seen,) = caller.http.get("/v1/memory").json()["servers"]
    shown: list[dict[str, Any]] = seen["trainers"]
    return shown


def spent_money(caller: Caller) -> Decimal:
    """What was spent of the tenant's only budget."""
    (budget,) = caller.http.get("/v1/budgets").json()["data"]
    return Decimal(budget["spent"])


@pytest.fixture(scope="module")
def succeeded(server: ServerUnderTest) -> tuple[Caller, FineTuningJob]:
    """A tenant, and the only job that it has trained."""
    caller = server.make_caller("trained")
    client = caller.openai
    job = create(client, num_epochs=2, validation_file=upload(client), metadata={"team": "support"})
    assert (job.status, job.fine_tuned_model, job.metadata) == ("queued", None, {"team": "support"})
    return caller, ended(client, job.id)


def test_a_job_becomes_a_version_that_answers(
    server: ServerUnderTest, succeeded: tuple[Caller, FineTuningJob]
) -> None:
    caller, job = succeeded
    assert (job.status, job.error) == ("succeeded", None)
    assert job.fine_tuned_model == "bot@1"
    assert job.trained_tokens == num_tokens(num_epochs=2) == trained_tokens(server, caller)
    assert job.seed == 7
    assert job.finished_at
    assert job.created_at <= job.finished_at
    answer = caller.openai.completions.create(model="bot@1", prompt="hi", max_tokens=2)
    assert answer.choices[0].text is not None
    wait_for(lambda: not folder(server, job.id).exists())


def test_the_version_tells_how_it_was_made(
    server: ServerUnderTest, succeeded: tuple[Caller, FineTuningJob]
) -> None:
    caller, job = succeeded
    version = caller.http.get("/v1/adapters/bot/versions/1").json()
    database = server.database
    with database.transaction(caller.tenant_id, read_only=True) as session:
        sha256 = session.get_one(StoredFile, job.training_file).sha256
        actions = list(session.scalars(select(AuditEntry.action).order_by(AuditEntry.number)))
    database.close()
    lineage = version["lineage"]
    recipe = lineage.pop("recipe")
    assert lineage == {
        "job": job.id,
        "base_id": version["base_id"],
        "parent": None,
        "training_sha256": sha256,
        "validation_sha256": sha256,
    }
    assert (recipe["method"], recipe["rank"], recipe["seed"]) == ("supervised", 16, 7)
    assert [each for each in actions if each.startswith("job.")] == ["job.create", "job.end"]


def test_events_and_checkpoints_are_listed_the_newest_first(
    succeeded: tuple[Caller, FineTuningJob],
) -> None:
    client, job = succeeded[0].openai, succeeded[1]
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=3))
    assert [each.id for each in events] == list(dict.fromkeys(each.id for each in events))
    assert events[-1].message == "The job was created."
    metrics = [each for each in events if each.type == "metrics"]
    assert {each.data["step"] for each in metrics} == set(range(1, 13))  # type: ignore[index]
    newest, *older = client.fine_tuning.jobs.checkpoints.list(job.id)
    assert (newest.step_number, newest.fine_tuning_job_id) == (12, job.id)
    assert newest.metrics.train_loss == pytest.approx(1 / 12)
    assert [each.step_number for each in older] == [8, 4]
    assert messages(client, job.id)[-1] == "The adapter is ready to be used: bot@1."


def test_jobs_are_listed_page_by_page_the_newest_first(caller: Caller) -> None:
    made = [create(caller.openai, suffix=f"bot-{number}").id for number in range(3)]
    assert [each.id for each in caller.openai.fine_tuning.jobs.list(limit=2)] == made[::-1]
    for job_id in made:
        caller.openai.fine_tuning.jobs.cancel(job_id)


def test_the_answer_shows_every_value_that_the_job_uses(caller: Caller) -> None:
    client = caller.openai
    method: Any = {
        "type": "dpo",
        "dpo": {"hyperparameters": {"beta": 0.3, "batch_size": 2, "learning_rate_multiplier": 0.5}},
    }
    lora = {"rank": 8, "alpha": 4, "targets": ["q_proj"], "rslora": True, "max_tokens": 16}
    job = create(client, examples("slow", 50), method=method, extra_body={"lora": lora})
    shown = caller.http.get(f"/v1/fine_tuning/jobs/{job.id}").json()
    client.fine_tuning.jobs.cancel(job.id)
    assert shown["method"]["type"] == "dpo"
    assert shown["method"]["dpo"]["hyperparameters"] == {
        "n_epochs": 3,
        "batch_size": 2,
        "learning_rate_multiplier": 0.5,
        "beta": 0.3,
    }
    assert shown["method"]["supervised"] is None
    assert shown["lora"] == {**lora, "alpha": 4.0, "dora": False, "packing": False}


INVALID: dict[str, tuple[dict[str, Any], str, str]] = {
    "another base": ({"model": "no-such"}, "model_not_tunable", "model"),
    "no adapter": ({"suffix": None}, "invalid_parameter", "suffix"),
    "two adapters": ({"adapter": "other"}, "invalid_parameter", "suffix"),
    "a bad name": ({"suffix": "Not A Name"}, "invalid_parameter", "suffix"),
    "the base's name": ({"suffix": "tiny"}, "invalid_parameter", "suffix"),
    "an unknown method": (
        {"method": {"type": "reinforcement"}},
        "invalid_parameter",
        "method.type",
    ),
    "another method's options": (
        {"method": {"type": "dpo", "supervised": {}}},
        "invalid_parameter",
        "method.supervised",
    ),
    "two places": (
        {
            "method": {"type": "supervised", "supervised": {"hyperparameters": {}}},
            "hyperparameters": {"n_epochs": 1},
        },
        "invalid_parameter",
        "hyperparameters",
    ),
    "an unknown target": ({"lora": {"targets": ["x"]}}, "invalid_parameter", "lora.targets"),
    "too long": ({"lora": {"max_tokens": 10**6}}, "invalid_parameter", "lora.max_tokens"),
    "packed pairs": (
        {"method": {"type": "dpo"}, "lora": {"packing": True}},
        "invalid_parameter",
        "lora.packing",
    ),
    "an integration": (
        {"integrations": [{"type": "wandb"}]},
        "unsupported_parameter",
        "integrations",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_what_is_asked_is_checked(resident: Caller, case: str) -> None:
    change, code, param = INVALID[case]
    body = {"model": "tiny", "training_file": "file-none", "suffix": "bot", **change}
    answer = resident.http.post("/v1/fine_tuning/jobs", json=body)
    assert answer.status_code == 400, answer.text
    check_envelope(answer, code, param)


def test_only_own_files_of_the_right_purpose_are_trained_on(
    caller: Caller, make_caller: Callable[[], Caller]
) -> None:
    client, other = caller.openai, make_caller().openai
    batch = client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    with pytest.raises(BadRequestError) as refused:
        client.fine_tuning.jobs.create(model="tiny", training_file=batch.id, suffix="bot")
    assert refused.value.param == "training_file"
    file = upload(client)
    with pytest.raises(NotFoundError) as absent:
        other.fine_tuning.jobs.create(model="tiny", training_file=file, suffix="bot")
    assert absent.value.code == "file_not_found"
    job = create(client)
    for ask in (
        other.fine_tuning.jobs.retrieve,
        other.fine_tuning.jobs.cancel,
        other.fine_tuning.jobs.pause,
        other.fine_tuning.jobs.resume,
    ):
        with pytest.raises(NotFoundError):
            ask(job.id)
    assert list(other.fine_tuning.jobs.list()) == []


def test_a_key_restricted_to_adapters_trains_these_only(caller: Caller) -> None:
    job = create(caller.openai, suffix="other")
    caller.openai.fine_tuning.jobs.cancel(job.id)
    scopes = ["infer", "adapters:read", "adapters:write"]
    issued = caller.http.post(
        "/v1/keys", json={"name": "narrow", "scopes": scopes, "adapters": ["bot"]}
    ).json()
    narrow = caller.openai.with_options(api_key=issued["key"])
    with pytest.raises(NotFoundError) as refused:
        create(narrow, suffix="other")
    assert refused.value.code == "adapter_not_found"
    with pytest.raises(NotFoundError):
        narrow.fine_tuning.jobs.retrieve(job.id)
    assert list(narrow.fine_tuning.jobs.list()) == []


def test_a_file_that_a_job_reads_stays(caller: Caller) -> None:
    client = caller.openai
    job = create(client, examples("slow", 100))
    with pytest.raises(ConflictError) as refused:
        client.files.delete(job.training_file)
    assert refused.value.code == "file_in_use"
    client.fine_tuning.jobs.cancel(job.id)
    client.files.delete(job.training_file)


def test_a_cancelled_job_ends_its_trainer_and_pays_for_its_steps(
    server: ServerUnderTest, caller: Caller
) -> None:
    client = caller.openai
    job = create(client, examples("slow", 200))
    wait_for(lambda: trained_tokens(server, caller) > 0, seconds=60)
    assert folder(server, job.id).stat().st_mode & 0o777 == 0o700
    (trainer,) = trainers(server)
    (shown,) = trainer_memories(caller)
    assert (shown["job"], shown["tenant"], shown["adapter"]) == (job.id, caller.slug, "bot")
    assert shown["resident_bytes"] > 1 << 20
    job = client.fine_tuning.jobs.cancel(job.id)
    assert job.status == "cancelled"
    wait_for(lambda: not Path(f"/proc/{trainer}").exists())
    wait_for(lambda: not trainer_memories(caller))
    wait_for(lambda: not folder(server, job.id).exists())
    job = client.fine_tuning.jobs.retrieve(job.id)
    step = caller.http.get(f"/v1/fine_tuning/jobs/{job.id}").json()["step"]
    assert job.trained_tokens == num_tokens(step) == trained_tokens(server, caller)
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled", "again: no error"
    with pytest.raises(ConflictError):
        client.fine_tuning.jobs.pause(job.id)


@pytest.mark.slow
def test_a_paused_job_goes_on_where_it_was(server: ServerUnderTest, caller: Caller) -> None:
    client = caller.openai
    job = create(client, examples("slow", 60))
    wait_for(lambda: trained_tokens(server, caller) > 0, seconds=60)
    assert str(client.fine_tuning.jobs.pause(job.id).status) == "paused"
    wait_for(lambda: not trainers(server), seconds=30)
    before = client.fine_tuning.jobs.retrieve(job.id)
    assert str(before.status) == "paused"
    assert (before.trained_tokens or 0) < num_tokens(60)
    assert client.fine_tuning.jobs.resume(job.id).status in {"queued", "running"}
    job = ended(client, job.id)
    assert (job.status, job.trained_tokens) == ("succeeded", num_tokens(60))
    assert trained_tokens(server, caller) == num_tokens(60)
    assert any(text.startswith("Training goes on after step") for text in messages(client, job.id))


@pytest.mark.slow
def test_a_job_without_tokens_left_is_paused_and_goes_on_when_the_limit_is_raised(
    server: ServerUnderTest, caller: Caller
) -> None:
    client, database = caller.openai, server.database
    limit(database, caller.tenant_id, trained_tokens_per_period=20)
    job = create(client, examples("slow", 60))
    wait_for(lambda: str(client.fine_tuning.jobs.retrieve(job.id).status) == "paused", seconds=60)
    wait_for(lambda: not trainers(server), seconds=30)
    assert 20 <= trained_tokens(server, caller) < num_tokens(60)
    assert "used up" in " ".join(messages(client, job.id))
    with pytest.raises(RateLimitError, match="none are left") as refused:
        client.fine_tuning.jobs.resume(job.id)
    assert refused.value.code == "insufficient_quota"
    with pytest.raises(RateLimitError, match="none are left"):
        create(client)
    limit(database, caller.tenant_id, trained_tokens_per_period=10**6)
    database.close()
    client.fine_tuning.jobs.resume(job.id)
    assert ended(client, job.id).trained_tokens == num_tokens(60) == trained_tokens(server, caller)


@pytest.mark.slow
def test_a_job_costs_its_tokens_at_the_price_of_when_it_was_created(
    server: ServerUnderTest, caller: Caller
) -> None:
    database = server.database
    set_price(database, tenant_id=caller.tenant_id, trained=3_000_000)
    time.sleep(REUSE_SECONDS)  # the server's copy of the prices is no older
    job = create(caller.openai, examples("slow", 40))
    set_price(database, tenant_id=caller.tenant_id, trained=10**9, since=utc_now())
    database.close()
    assert ended(caller.openai, job.id).trained_tokens == num_tokens(40)
    (usage,) = caller.http.get("/v1/usage").json()["data"]
    assert usage["trained_tokens"] == num_tokens(40)
    assert Decimal(usage["amount"]) == Decimal(3 * num_tokens(40)) / 10**9


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["the tenant's", "the key's"])
def test_a_job_whose_budget_is_exhausted_is_paused_and_goes_on_by_itself_when_it_is_raised(
    server: ServerUnderTest, caller: Caller, whose: str
) -> None:
    client, database = caller.openai, server.database
    (key,) = caller.http.get("/v1/keys").json()["data"]
    holder = TENANT if whose == "the tenant's" else key_holder(key["id"])
    set_price(database, tenant_id=caller.tenant_id, trained=10**6 * UNIT)
    set_budget(database, caller.tenant_id, 20 * UNIT, holder=holder)
    time.sleep(REUSE_SECONDS)  # the server's copy of the prices is no older
    job = create(client, examples("slow", 60))
    path = f"/v1/fine_tuning/jobs/{job.id}"
    wait_for(lambda: caller.http.get(path).json()["pause_reason"] == "budget", seconds=60)
    wait_for(lambda: not trainers(server), seconds=30)
    assert f"{whose} budget is exhausted" in " ".join(messages(client, job.id))
    wait_for(lambda: spent_money(caller) == trained_tokens(server, caller))  # the last report
    assert 20 <= trained_tokens(server, caller) < num_tokens(60)
    with pytest.raises(RateLimitError, match="nothing is left to train with") as refused:
        client.fine_tuning.jobs.resume(job.id)
    assert refused.value.code == "budget_exhausted"
    with pytest.raises(RateLimitError, match="nothing is left to train with"):
        create(client)
    set_budget(database, caller.tenant_id, 10**6 * UNIT, holder=holder)
    assert ended(client, job.id).trained_tokens == num_tokens(60)
    assert caller.http.get(path).json()["pause_reason"] is None
    database.close()
    assert spent_money(caller) == num_tokens(60) == trained_tokens(server, caller)


@pytest.mark.slow
def test_a_trainer_that_dies_is_restarted_from_its_checkpoint_and_steps_count_once(
    server: ServerUnderTest, caller: Caller
) -> None:
    job = ended(caller.openai, create(caller.openai, examples("die-2", 12)).id)
    assert (job.status, job.trained_tokens) == ("succeeded", num_tokens(12))
    assert trained_tokens(server, caller) == num_tokens(12)
    said = messages(caller.openai, job.id)
    assert said.count("The trainer ended without a result (signal 9).") == 2


@pytest.mark.slow
def test_a_trainer_that_dies_too_often_fails_its_job(
    server: ServerUnderTest, caller: Caller
) -> None:
    job = ended(caller.openai, create(caller.openai, examples("die-9", 12)).id)
    assert job.status == "failed"
    assert job.error
    assert job.error.code == "training_failed"
    assert job.trained_tokens == num_tokens(3) == trained_tokens(server, caller)


def test_wrong_data_fails_the_job_with_its_line_and_costs_nothing(
    server: ServerUnderTest, caller: Caller
) -> None:
    job = ended(caller.openai, create(caller.openai, examples("wrong")).id)
    assert job.status == "failed"
    assert job.error
    assert (job.error.code, job.error.param) == ("invalid_training_data", "training_file")
    assert job.error.message == "Line 2: `messages` is missing"
    assert trained_tokens(server, caller) == 0


@pytest.mark.slow
def test_an_adapter_that_the_intake_refuses_fails_the_job_with_its_reason(caller: Caller) -> None:
    job = ended(caller.openai, create(caller.openai, examples("none")).id)
    assert job.status == "failed"
    assert job.error
    assert job.error.code == "shape_mismatch"
    assert caller.http.get("/v1/adapters/bot").status_code == 404


@pytest.mark.slow
def test_usage_shows_trained_tokens_of_the_adapter(caller: Caller) -> None:
    ended(caller.openai, create(caller.openai).id)
    rows = caller.http.get("/v1/usage").json()["data"]
    (row,) = [each for each in rows if each["trained_tokens"]]
    assert (row["adapter"], row["version"], row["requests"]) == ("bot", None, 0)
    assert row["trained_tokens"] == num_tokens()
    assert date.fromisoformat(row["day"])


def test_one_idempotency_key_creates_one_job(caller: Caller) -> None:
    file = upload(caller.openai)
    body = {"model": "tiny", "training_file": file, "suffix": "bot"}
    headers = {"idempotency-key": "train-once"}
    made = {
        caller.http.post("/v1/fine_tuning/jobs", json=body, headers=headers).json()["id"]
        for _ in range(2)
    }
    assert len(made) == 1
    caller.openai.fine_tuning.jobs.cancel(made.pop())


def test_a_reader_sees_jobs_and_creates_none(caller: Caller) -> None:
    job = create(caller.openai)
    issued = caller.http.post("/v1/keys", json={"name": "r", "scopes": ["adapters:read"]}).json()
    reader = caller.openai.with_options(api_key=issued["key"])
    assert reader.fine_tuning.jobs.retrieve(job.id).id == job.id
    with pytest.raises(PermissionDeniedError):
        reader.fine_tuning.jobs.cancel(job.id)
    caller.openai.fine_tuning.jobs.cancel(job.id)


def test_a_trainer_has_no_secrets_in_its_environment(
    server: ServerUnderTest, caller: Caller
) -> None:
    job = create(caller.openai, examples("slow", 100))
    own = folder(server, job.id)

    def own_trainers() -> list[int]:  # one of another test may be about to end
        return [pid for pid in trainers(server) if Path(f"/proc/{pid}/cwd").resolve() == own]

    (trainer,) = wait_for(own_trainers, seconds=60)
    environment = Path(f"/proc/{trainer}/environ").read_bytes().decode().split("\0")
    names = {entry.partition("=")[0] for entry in environment if entry}
    caller.openai.fine_tuning.jobs.cancel(job.id)
    assert not {
        name
        for name in names - LOG_VARIABLES - {"HF_HUB_OFFLINE"}
        if name.startswith(("LORAPLEX_", "AWS_", "HF_", "PG"))
    }
