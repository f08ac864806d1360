"""A server with sample data: the demo's base, three tenants, adapters, requests, usage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
from sqlalchemy import select

from loraplex.api.cli.demo import QUANTIZATION
from loraplex.api.demo.manifest import WEIGHTS
from loraplex.api.demo.recipe import BASE_NAME
from loraplex.api.demo.task import held_out_requests
from loraplex.engine.tuning.messages import Recipe
from loraplex.platform.budgets.models import BudgetUse
from loraplex.platform.models import RequestLogEntry, TuningEvent, TuningJob, UsageDay
from loraplex.platform.tuning.states import JobState
from support.money import UNIT, set_price
from support.server import Caller, ServerUnderTest, serving
from support.webhooks import add_webhook

TENANTS: Mapping[str, Mapping[str, Any]] = {
    "acme": {"name": "Acme Ltd.", "weight": 2.0},
    "globex": {"name": "Globex", "weight": 1.0},
    "initech": {"name": "Initech", "weight": 0.5},
}
PUSHES = (
    ("acme", "sql", "sql"),
    ("acme", "json", "json"),
    ("acme", "sql", "assistant"),
    ("acme", "json", "assistant"),
    ("globex", "pirate", "pirate"),
    ("globex", "pirate", "assistant"),
)
"""Tenant, which of the demo's adapters, and as what."""
WEBHOOK_HOST = "hooks.acme.example"
"""Webhooks may name it; it does not exist."""
REPLICA = "gpu-1.internal:7070"
"""A row of the fleet's table; the server has an engine of its own and does not connect to it."""
DAYS = 14
NUM_LOGGED = 40
NUM_ASKED = 4
NUM_STEPS = 60
"""Of the fine-tuning job that has succeeded."""
RECIPE = Recipe(
    method="supervised",
    rank=16,
    alpha=32.0,
    targets=(),
    is_rslora=False,
    is_dora=False,
    num_epochs=3,
    batch_size=8,
    learning_rate=2e-4,
    is_packed=False,
    max_tokens=2048,
    seed=7,
    dpo_beta=0.1,
    checkpoint_steps=20,
)


@dataclass(frozen=True)
class Seeded:
    """The server, who may look at it, and what it was given."""

    server: ServerUnderTest
    operator_key: str
    callers: dict[str, Caller]
    """By slug."""

    @cached_property
    def admin(self) -> httpx.Client:
        """An operator's client."""
        headers = {"authorization": f"Bearer {self.operator_key}"}
        return httpx.Client(base_url=self.server.url, headers=headers, timeout=60.0)

    def change(
        self, method: str, path: str, body: object = None, *, tenant: str | None = None
    ) -> Any:
        """What the operator's request answers; it has to succeed."""
        headers = {"x-loraplex-tenant": tenant} if tenant else {}
        answer = self.admin.request(method, path, json=body, headers=headers)
        assert answer.is_success, answer.text
        return answer.json()


@contextmanager
def seeded_server(data_dir: Path) -> Iterator[Seeded]:
    """The server, until the block is left."""
    options = (
        *("--served-model-name", BASE_NAME, "--quantize", QUANTIZATION),
        *("--webhook-hosts", WEBHOOK_HOST),
    )
    tuning = {"LORAPLEX_TUNING": "true", "TEST_TRAINER": "support.fake_trainer"}
    with serving(WEIGHTS / "base", data_dir, *options, **tuning) as server:
        seeded = Seeded(server, server.make_operator("root"), {})
        try:
            _fill(seeded)
            yield seeded
        finally:
            seeded.admin.close()


def _fill(seeded: Seeded) -> None:
    callers = seeded.callers
    callers.update({slug: _make_tenant(seeded, slug) for slug in TENANTS})
    limits = {"requests_per_minute": 600, "tokens_per_period": 50_000_000, "adapters": 20}
    seeded.change("PUT", "/admin/tenants/acme/quota", limits)
    for slug, weights, name in PUSHES:
        callers[slug].push(WEIGHTS / weights, name, aliases=["prod"])
    _split_alias(callers["acme"])
    seeded.change("POST", "/admin/replicas", {"address": REPLICA})
    _set_prices_and_budgets(seeded)
    add_webhook(seeded.server, callers["acme"], f"https://{WEBHOOK_HOST}/loraplex")
    _ask(callers)
    _write_past(seeded)
    _write_jobs(seeded)


def _make_tenant(seeded: Seeded, slug: str) -> Caller:
    tenant = seeded.change("POST", "/admin/tenants", {"slug": slug, **TENANTS[slug]})
    scopes = ["infer", "adapters:read", "adapters:write", "usage:read"]
    key = {"name": "production", "scopes": scopes, "expires_in_days": 90}
    issued = seeded.change("POST", "/v1/keys", key, tenant=slug)
    for name, role in (("owner", "owner"), ("ben", "developer"), ("eve", "viewer")):
        user = {"email": f"{name}@{slug}.example", "role": role}
        seeded.change("POST", "/v1/users", user, tenant=slug)
    caller = Caller(seeded.server.url, tenant["id"], slug, issued["key"])
    seeded.server.callers.append(caller)
    return caller


def _set_prices_and_budgets(seeded: Seeded) -> None:
    acme = seeded.callers["acme"]
    database = seeded.server.database
    set_price(database, BASE_NAME)
    set_price(database, BASE_NAME, prompt=UNIT * 3 // 4, tenant_id=acme.tenant_id)
    (key,) = _listed(seeded, "/v1/keys")
    ben, *_ = _listed(seeded, "/v1/users")
    seeded.change("PUT", "/admin/tenants/acme/budgets/month", {"amount": "250"})
    seeded.change("PUT", f"/v1/keys/{key['id']}/budgets/month", {"amount": "100"}, tenant="acme")
    seeded.change("PUT", f"/v1/users/{ben['id']}/budgets/day", {"amount": "5"}, tenant="acme")
    with database.transaction(acme.tenant_id) as session:
        for number, use in enumerate(session.scalars(select(BudgetUse))):
            use.amount = (number + 1) * UNIT * 5 // 4
    database.close()


def _listed(seeded: Seeded, path: str) -> list[dict[str, Any]]:
    """The entries of a list of `acme`."""
    answer = seeded.admin.get(path, headers={"x-loraplex-tenant": "acme"})
    entries: list[dict[str, Any]] = answer.json()["data"]
    return entries


def _split_alias(acme: Caller) -> None:
    split = {"version": 1, "canary": {"version": 2, "percent": 10}}
    acme.http.put("/v1/adapters/assistant/aliases/prod", json=split).raise_for_status()


def _ask(callers: Mapping[str, Caller]) -> None:
    """Real answers of every adapter and the base, and one request for what is not there."""
    asked = [(slug, name) for slug, _, name in PUSHES] + [("initech", BASE_NAME)]
    for request in held_out_requests(NUM_ASKED):
        messages = [{"role": "user", "content": request.prompt}]
        for slug, model in asked:
            body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}
            callers[slug].http.post("/v1/chat/completions", json=body).raise_for_status()
    missing = {"model": "assistent", "messages": [{"role": "user", "content": "Ahoy"}]}
    assert callers["acme"].http.post("/v1/chat/completions", json=missing).status_code == 404


def _write_past(seeded: Seeded) -> None:
    """Usage of two weeks and requests of a day, as a busy server would have written them."""
    random, now = Random(7), datetime.now(UTC)
    database = seeded.server.database
    for slug, caller in seeded.callers.items():
        names = sorted({name for tenant, _, name in PUSHES if tenant == slug}) or [""]
        with database.transaction(caller.tenant_id) as session:
            for back in range(1, DAYS):
                day = (now - timedelta(days=back)).date()
                session.add_all(_usage_day(random, day, name) for name in names)
            session.add_all(
                _logged(random, now - timedelta(minutes=random.uniform(1, 1400)), slug, name)
                for name in names
                for _ in range(NUM_LOGGED)
            )
    database.close()


def _write_jobs(seeded: Seeded) -> None:
    """Fine-tuning jobs of `acme` that have ended: one has failed, the other has a curve."""
    database = seeded.server.database
    with database.transaction(seeded.callers["acme"].tenant_id) as session:
        failed, succeeded = _job("json", JobState.FAILED), _job("sql", JobState.SUCCEEDED)
        failed.error_code = "invalid_training_data"
        failed.error_message = "line 12: `messages` is missing"
        failed.error_param = "training_file"
        succeeded.version = 1
        succeeded.step = succeeded.num_steps = NUM_STEPS
        succeeded.num_tokens = NUM_STEPS * 4096
        session.add_all([failed, succeeded])
        session.flush()
        session.add_all(_measured(succeeded.id, step) for step in range(1, NUM_STEPS + 1))
    database.close()


def _job(adapter_name: str, state: JobState) -> TuningJob:
    now = datetime.now(UTC)
    return TuningJob(
        id=f"ftjob-{adapter_name:0>32}",
        adapter_name=adapter_name,
        created_by="key:production",
        training_file_id=f"file-{0:032x}",
        training_sha256=f"{0:064x}",
        validation_file_id=None,
        validation_sha256=None,
        recipe=msgspec.to_builtins(RECIPE),
        labels=None,
        state=state,
        num_steps=0,
        step=0,
        num_tokens=0,
        num_restarts=0,
        created_at=now - timedelta(minutes=50),
        started_at=now - timedelta(minutes=48),
        ended_at=now - timedelta(minutes=20),
    )


def _measured(job_id: str, step: int) -> TuningEvent:
    loss = 0.3 + 2.2 * 0.94**step
    figures = {"train_loss": loss, "train_mean_token_accuracy": 1 - loss / 3}
    if step % (NUM_STEPS // 3) == 0:
        figures |= {"valid_loss": loss + 0.1, "valid_mean_token_accuracy": 0.96 - loss / 3}
    return TuningEvent(
        id=f"ftevent-{step:032x}",
        job_id=job_id,
        number=step,
        level="info",
        kind="metrics",
        message=f"Step {step}/{NUM_STEPS}: training loss={loss:.4f}",
        data={"step": step, "total_steps": NUM_STEPS, **figures},
    )


def _usage_day(random: Random, day: Any, name: str) -> UsageDay:
    requests = random.randint(200, 900) // (3 if day.weekday() >= 5 else 1)
    prompt = requests * random.randint(150, 400)
    usage = UsageDay.begin(day, name, 1 if name else 0)
    usage.num_requests = requests
    usage.prompt_tokens = prompt
    usage.cached_tokens = int(prompt * random.uniform(0.2, 0.6))
    usage.completion_tokens = requests * random.randint(60, 160)
    usage.num_cold_loads = requests // 40 if name else 0
    usage.amount = (prompt * UNIT + usage.completion_tokens * 2 * UNIT) // 10**6
    usage.residency_byte_seconds = 318_432 * random.randint(20_000, 80_000) if name else 0
    return usage


def _logged(random: Random, at: datetime, slug: str, name: str) -> RequestLogEntry:
    prompt, completion = random.randint(40, 900), random.randint(8, 200)
    first = random.lognormvariate(3.4, 0.5)
    return RequestLogEntry(
        request_id=f"req_{random.getrandbits(96):024x}",
        created_at=at,
        key_id=None,
        route="/v1/chat/completions",
        status=200,
        error_code=None,
        model=f"{slug}/{name}@1" if name else BASE_NAME,
        adapter_name=name or None,
        adapter_version=1 if name else None,
        finish_reason="stop",
        tier=random.choice(("device", "device", "device", "host")) if name else None,
        prompt_tokens=prompt,
        cached_tokens=prompt // 3,
        completion_tokens=completion,
        queue_ms=random.lognormvariate(1.5, 0.6),
        adapter_wait_ms=0.0,
        load_ms=0.0 if name else None,
        first_token_ms=first,
        total_ms=first + completion * random.uniform(6, 11),
    )
