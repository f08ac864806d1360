"""Random calls of three tenants to the API, and a model of what each may see.

Everything that a tenant writes contains its mark, and every id is recorded with its owner. If a
response contains anything of another tenant, apart from what its own request named, it is a leak.
"""

from __future__ import annotations

import http.client
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from loraplex.platform.keys.principal import Scope

NAME = "bot"
"""Of an adapter that every tenant has."""
MARKS = {f"walk-{number}": f"zq{number}mark" for number in range(3)}
MAX_LISTED = 500
_WORDS = re.compile(r"zq\dmark|[0-9A-Za-z][0-9A-Za-z-]{7,}")
"""Marks and ids, among others."""
MAX_ALIASES = 6


class Answer(NamedTuple):
    status: int
    text: str

    @property
    def data(self) -> Any:
        return json.loads(self.text)


@dataclass
class Caller:
    """A key, on the tenant for which it calls."""

    name: str
    key: str
    tenant: str
    scopes: frozenset[Scope]
    is_operator: bool = False

    @property
    def headers(self) -> dict[str, str]:
        acting_on = {"x-loraplex-tenant": self.tenant} if self.is_operator else {}
        return {"authorization": f"Bearer {self.key}", **acting_on}


@dataclass
class Tenant:
    """What a tenant has, as far as it was made in the walk."""

    slug: str
    keys: dict[str, bool] = field(default_factory=dict)
    """By id: whether it is in use."""
    users: dict[str, bool] = field(default_factory=dict)
    uploads: dict[str, str] = field(default_factory=dict)
    aliases: set[str] = field(default_factory=set)
    shadows: set[str] = field(default_factory=set)
    """The aliases that have one."""
    requests: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    batches: set[str] = field(default_factory=set)
    jobs: set[str] = field(default_factory=set)
    evaluations: set[str] = field(default_factory=set)
    responses: set[str] = field(default_factory=set)
    webhooks: set[str] = field(default_factory=set)
    samples: set[str] = field(default_factory=set)

    @property
    def mark(self) -> str:
        return MARKS[self.slug]

    def owns(self, words: Iterable[str]) -> bool:
        """Whether one of the words is of this tenant."""
        batches = {batch.removeprefix("batch_") for batch in self.batches}  # as _WORDS finds them
        responses = {response.removeprefix("resp_") for response in self.responses}
        webhooks = {webhook.removeprefix("whk_") for webhook in self.webhooks}
        samples = {sample.removeprefix("smp_") for sample in self.samples}
        theirs = (
            *(self.keys, self.users, self.uploads, self.requests, (self.mark,)),
            *(self.files, batches, self.jobs, self.evaluations, responses, webhooks, samples),
        )
        return any(word in ids for word in words for ids in theirs)


class Violation(AssertionError):
    """An answer that the model does not allow."""


class Walk:
    """One walk; `run` raises Violation at the first answer that is not the model's."""

    def __init__(self, url: str, tenants: Mapping[str, Tenant], callers: list[Caller], seed: int):
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.netloc, timeout=60)
        self._tenants = tenants
        self._callers = callers
        self._random = random.Random(seed)
        self._number = 0
        self.outcomes: Counter[tuple[str, int]] = Counter()
        """By action and status: what the walk has met."""

    def run(self, num_steps: int) -> None:
        """Take so many steps, and compare everything at the end."""
        actions: list[Callable[[Caller, Tenant], None]] = [
            *(self._make_key, self._read_key, self._revoke_key, self._list_keys),
            *(self._make_user, self._read_user, self._disable_user, self._list_users),
            *(self._set_alias, self._remove_alias, self._list_aliases),
            *(self._set_shadow, self._read_shadow),
            *(
                self._open_upload,
                self._read_upload,
                self._read_file,
                self._read_batch,
                self._read_job,
                self._read_evaluation,
            ),
            *(self._read_response, self._read_webhook, self._test_webhook),
            *(self._read_sample, self._set_sampling),
            *(self._set_budget, self._set_limits),
            *(self._look_around, self._read_request, self._resolve_model),
        ]
        for number in range(num_steps):
            self._number = number
            caller = self._random.choice(self._callers)
            target = self._tenants[self._random.choice([caller.tenant, *self._tenants])]
            self._random.choice(actions)(caller, target)
        for caller in self._callers:
            if caller.scopes >= set(Scope):
                self._compare(caller)

    def ask(self, caller: Caller, method: str, path: str, body: Any = None) -> Answer:
        """Send it, and look for what is others' in the answer."""
        content = None if body is None else json.dumps(body)
        headers = {**caller.headers, "content-type": "application/json"}
        self._connection.request(method, path, content, headers)
        response = self._connection.getresponse()
        answer = Answer(response.status, response.read().decode())
        if answer.status >= 500:
            raise self._violation(caller, method, path, answer, "failed")
        told = set(_WORDS.findall(answer.text)) - set(_WORDS.findall(f"{path} {content or ''}"))
        for tenant in self._tenants.values():
            if tenant.slug != caller.tenant and tenant.owns(told):
                raise self._violation(caller, method, path, answer, f"tells of {tenant.slug}")
        return answer

    def close(self) -> None:
        self._connection.close()

    # --- what callers do ------------------------------------------------------------------------

    def _make_key(self, caller: Caller, target: Tenant) -> None:
        body = {"name": f"key {self._tenants[caller.tenant].mark}", "scopes": ["adapters:read"]}
        answer = self._expect(caller, Scope.KEYS_MANAGE, "POST", "/v1/keys", body, own=201)
        if answer is not None:
            self._tenants[caller.tenant].keys[answer.data["id"]] = True

    def _read_key(self, caller: Caller, target: Tenant) -> None:
        if (key := self._any(target.keys)) is not None:
            self._expect(caller, Scope.KEYS_MANAGE, "GET", f"/v1/keys/{key}", target=target)

    def _revoke_key(self, caller: Caller, target: Tenant) -> None:
        if (key := self._any(target.keys)) is None:
            return
        path = f"/v1/keys/{key}"
        if self._expect(caller, Scope.KEYS_MANAGE, "DELETE", path, target=target) is not None:
            target.keys[key] = False

    def _set_budget(self, caller: Caller, target: Tenant) -> None:
        if (key := self._any(target.keys)) is not None:
            path, body = f"/v1/keys/{key}/budgets/day", {"amount": "5"}
            self._expect(caller, Scope.KEYS_MANAGE, "PUT", path, body, target=target)

    def _set_limits(self, caller: Caller, target: Tenant) -> None:
        if (user := self._any(target.users)) is not None:
            path, body = f"/v1/users/{user}/limits", {"concurrent_requests": 3}
            self._expect(caller, Scope.USERS_MANAGE, "PUT", path, body, target=target)

    def _list_keys(self, caller: Caller, target: Tenant) -> None:
        path = f"/v1/keys?active=true&limit={MAX_LISTED}"
        answer = self._expect(caller, Scope.KEYS_MANAGE, "GET", path)
        if answer is not None:
            own = self._tenants[caller.tenant].keys
            listed = {entry["id"] for entry in answer.data["data"] if entry["id"] in own}
            self._check_equal(caller, "keys", listed, {key for key, lives in own.items() if lives})

    def _make_user(self, caller: Caller, target: Tenant) -> None:
        mark = self._tenants[caller.tenant].mark
        body = {"email": f"u{self._number}@{mark}.example", "role": "viewer"}
        answer = self._expect(caller, Scope.USERS_MANAGE, "POST", "/v1/users", body, own=201)
        if answer is not None:
            self._tenants[caller.tenant].users[answer.data["id"]] = True

    def _read_user(self, caller: Caller, target: Tenant) -> None:
        if (user := self._any(target.users)) is not None:
            self._expect(caller, Scope.USERS_MANAGE, "GET", f"/v1/users/{user}", target=target)

    def _disable_user(self, caller: Caller, target: Tenant) -> None:
        if (user := self._any(target.users)) is None:
            return
        path, body = f"/v1/users/{user}", {"disabled": True}
        done = self._expect(caller, Scope.USERS_MANAGE, "PATCH", path, body, target=target)
        if done is not None:
            target.users[user] = False

    def _list_users(self, caller: Caller, target: Tenant) -> None:
        path = f"/v1/users?disabled=false&limit={MAX_LISTED}"
        answer = self._expect(caller, Scope.USERS_MANAGE, "GET", path)
        if answer is not None:
            own = self._tenants[caller.tenant].users
            listed = {entry["id"] for entry in answer.data["data"] if entry["id"] in own}
            self._check_equal(
                caller, "users", listed, {user for user, is_on in own.items() if is_on}
            )

    def _set_alias(self, caller: Caller, target: Tenant) -> None:
        own = self._tenants[caller.tenant]
        alias = f"{own.mark}-{self._random.randrange(MAX_ALIASES)}"
        path = f"/v1/adapters/{NAME}/aliases/{alias}"
        if self._expect(caller, Scope.ADAPTERS_WRITE, "PUT", path, {"version": 1}) is not None:
            own.aliases.add(alias)

    def _remove_alias(self, caller: Caller, target: Tenant) -> None:
        if (alias := self._any(target.aliases)) is None:
            return
        path = f"/v1/adapters/{NAME}/aliases/{alias}"
        if self._expect(caller, Scope.ADAPTERS_WRITE, "DELETE", path, target=target, own=204):
            target.aliases.discard(alias)
            target.shadows.discard(alias)

    def _set_shadow(self, caller: Caller, target: Tenant) -> None:
        if (alias := self._any(target.aliases)) is None:
            return
        path = f"/v1/adapters/{NAME}/aliases/{alias}/shadow"
        body = {"version": 2, "percent": 50}
        if self._expect(caller, Scope.ADAPTERS_WRITE, "PUT", path, body, target=target):
            target.shadows.add(alias)

    def _read_shadow(self, caller: Caller, target: Tenant) -> None:
        if (alias := self._any(target.shadows)) is None:
            return
        path = f"/v1/adapters/{NAME}/aliases/{alias}/shadow"
        self._expect(caller, Scope.ADAPTERS_READ, "GET", path, target=target)

    def _list_aliases(self, caller: Caller, target: Tenant) -> None:
        answer = self._expect(caller, Scope.ADAPTERS_READ, "GET", f"/v1/adapters/{NAME}/aliases")
        if answer is not None:
            listed = {entry["alias"] for entry in answer.data["data"]}
            self._check_equal(caller, "aliases", listed, self._tenants[caller.tenant].aliases)

    def _open_upload(self, caller: Caller, target: Tenant) -> None:
        own = self._tenants[caller.tenant]
        name = f"{own.mark}-{len(own.uploads) % 3}"
        digest = f"{self._random.getrandbits(256):064x}"
        body = {"config": {"r": 1}, "size_bytes": 1, "sha256": digest}
        path = f"/v1/adapters/{name}/uploads"
        answer = self._expect(caller, Scope.ADAPTERS_WRITE, "POST", path, body, own=201)
        if answer is not None:
            own.uploads[answer.data["id"]] = name

    def _read_upload(self, caller: Caller, target: Tenant) -> None:
        if (upload := self._any(target.uploads)) is not None:
            path = f"/v1/uploads/{upload}"
            self._expect(caller, Scope.ADAPTERS_WRITE, "GET", path, target=target)

    def _read_file(self, caller: Caller, target: Tenant) -> None:
        if (file := self._any(target.files)) is not None:
            path = f"/v1/files/{file}{self._random.choice(['', '/content'])}"
            self._expect(caller, Scope.INFER, "GET", path, target=target)

    def _read_batch(self, caller: Caller, target: Tenant) -> None:
        if (batch := self._any(target.batches)) is not None:
            self._expect(caller, Scope.INFER, "GET", f"/v1/batches/{batch}", target=target)

    def _read_job(self, caller: Caller, target: Tenant) -> None:
        if (job := self._any(target.jobs)) is not None:
            path = f"/v1/fine_tuning/jobs/{job}{self._random.choice(['', '/events'])}"
            self._expect(caller, Scope.ADAPTERS_READ, "GET", path, target=target)

    def _read_evaluation(self, caller: Caller, target: Tenant) -> None:
        if (evaluation := self._any(target.evaluations)) is not None:
            path = f"/v1/adapters/{NAME}/evaluations/{evaluation}"
            self._expect(caller, Scope.ADAPTERS_READ, "GET", path, target=target)

    def _read_response(self, caller: Caller, target: Tenant) -> None:
        if (response := self._any(target.responses)) is not None:
            path = f"/v1/responses/{response}{self._random.choice(['', '/input_items'])}"
            self._expect(caller, Scope.INFER, "GET", path, target=target)

    def _read_webhook(self, caller: Caller, target: Tenant) -> None:
        if (webhook := self._any(target.webhooks)) is not None:
            path = f"/v1/webhooks/{webhook}{self._random.choice(['', '/deliveries'])}"
            self._expect(caller, Scope.WEBHOOKS_READ, "GET", path, target=target)

    def _test_webhook(self, caller: Caller, target: Tenant) -> None:
        if (webhook := self._any(target.webhooks)) is not None:
            path = f"/v1/webhooks/{webhook}/test"
            self._expect(caller, Scope.WEBHOOKS_WRITE, "POST", path, target=target, own=202)

    def _read_sample(self, caller: Caller, target: Tenant) -> None:
        if (sample := self._any(target.samples)) is not None:
            path = f"/v1/adapters/{NAME}/samples/{sample}"
            self._expect(caller, Scope.SAMPLES_READ, "GET", path, target=target)

    def _set_sampling(self, caller: Caller, target: Tenant) -> None:
        path, body = f"/v1/adapters/{NAME}/sampling", {"percent": 100, "days": 3}
        self._expect(caller, Scope.SAMPLES_WRITE, "PUT", path, body)

    def _look_around(self, caller: Caller, target: Tenant) -> None:
        path, scope = self._random.choice(
            [
                ("/v1/me", None),
                ("/v1/models", Scope.INFER),
                ("/v1/files", Scope.INFER),
                ("/v1/batches", Scope.INFER),
                ("/v1/fine_tuning/jobs", Scope.ADAPTERS_READ),
                ("/v1/adapters", Scope.ADAPTERS_READ),
                (f"/v1/adapters/{NAME}", Scope.ADAPTERS_READ),
                (f"/v1/adapters/{NAME}/sampling", Scope.ADAPTERS_READ),
                (f"/v1/adapters/{NAME}/samples", Scope.SAMPLES_READ),
                (f"/v1/adapters/{NAME}/versions/1/readiness", Scope.ADAPTERS_READ),
                (f"/v1/adapters/{NAME}/golden-sets", Scope.ADAPTERS_READ),
                (f"/v1/adapters/{NAME}/evaluations", Scope.ADAPTERS_READ),
                ("/v1/usage", Scope.USAGE_READ),
                ("/v1/quota", Scope.USAGE_READ),
                ("/v1/webhooks", Scope.WEBHOOKS_READ),
                ("/v1/budgets", Scope.USAGE_READ),
                ("/v1/audit?limit=20", Scope.AUDIT_READ),
            ]
        )
        self._expect(caller, scope, "GET", path)

    def _resolve_model(self, caller: Caller, target: Tenant) -> None:
        name = quote(f"{target.slug}/{NAME}", safe="")
        self._expect(caller, Scope.INFER, "GET", f"/v1/models/{name}", target=target)

    def _read_request(self, caller: Caller, target: Tenant) -> None:
        if (request := self._any(target.requests)) is not None:
            path = f"/v1/usage/requests/{request}"
            self._expect(caller, Scope.USAGE_READ, "GET", path, target=target)

    # --- what the model says --------------------------------------------------------------------

    def _expect(
        self,
        caller: Caller,
        scope: Scope | None,
        method: str,
        path: str,
        body: Any = None,
        *,
        target: Tenant | None = None,
        own: int = 200,
    ) -> Answer | None:
        """The answer if the caller may have it. `target` owns what the path names; None: no one."""
        answer = self.ask(caller, method, path, body)
        is_foreign = target is not None and target.slug != caller.tenant
        expected = own
        if scope is not None and scope not in caller.scopes:
            expected = 403
        elif is_foreign:
            expected = 404
        if answer.status != expected:
            raise self._violation(caller, method, path, answer, f"should be {expected}")
        action = path.split("?")[0].split("/")[2]
        self.outcomes[f"{method} {action}{' foreign' if is_foreign else ''}", answer.status] += 1
        return answer if expected == own else None

    def _compare(self, caller: Caller) -> None:
        for look in (self._list_keys, self._list_users, self._list_aliases):
            look(caller, self._tenants[caller.tenant])

    def _any(self, things: Any) -> Any:
        return self._random.choice(sorted(things)) if things else None

    def _check_equal(self, caller: Caller, what: str, seen: set[str], expected: set[str]) -> None:
        if seen != expected:
            raise Violation(f"step {self._number}: {caller.name} sees {what} {seen ^ expected}")

    def _violation(
        self, caller: Caller, method: str, path: str, answer: Answer, why: str
    ) -> Violation:
        return Violation(
            f"step {self._number}: {caller.name}: {method} {path}: {answer.status} {why}: "
            f"{answer.text[:500]}"
        )
