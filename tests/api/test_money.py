"""Prices, budgets and limits of callers through the API."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest

from loraplex.platform.base import utc_now
from support.server import Caller, ServerUnderTest

PRICE = {
    "base": "priced-base",
    "currency": "EUR",
    "prompt_tokens": "0.15",
    "cached_tokens": "0.0375",
    "completion_tokens": "0.6",
    "trained_tokens": "2.50",
    "batch_discount": 50,
}


@pytest.fixture(scope="module")
def operator(server: ServerUnderTest) -> Iterator[httpx.Client]:
    key = server.make_operator("money-root")
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60.0) as http:
        yield http


@pytest.fixture(scope="module")
def payer(server: ServerUnderTest) -> Caller:
    return server.make_caller("money-payer")


def code_of(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error.get("param")


def test_a_price_is_listed_as_it_was_set(operator: httpx.Client, payer: Caller) -> None:
    since = utc_now() + timedelta(days=400)
    body = {**PRICE, "tenant": payer.slug, "effective_from": since.isoformat()}
    answer = operator.post("/admin/prices", json=body)
    assert answer.status_code == 201, answer.text
    price = answer.json()
    shown = {**PRICE, "completion_tokens": "0.60", "tenant": payer.slug, "object": "price"}
    assert shown.items() <= price.items()
    later = operator.post("/admin/prices", json=PRICE).json()
    listed = operator.get(f"/admin/prices?after={price['id'] - 1}").json()["data"]
    assert listed[:2] == [price, later]
    entries = operator.get("/admin/audit?action=price.set").json()["data"]
    assert entries[0]["details"]["prompt_tokens"] == "0.15"


def test_a_tenants_own_price_ends(operator: httpx.Client, server: ServerUnderTest) -> None:
    slug = server.make_caller("money-leaver").slug
    since = utc_now() + timedelta(days=1)
    end = {"tenant": slug, "base": PRICE["base"], "effective_from": since.isoformat()}
    refused = operator.post("/admin/prices/end", json=end)
    assert code_of(refused)[:2] == (404, "price_not_found")
    price = operator.post("/admin/prices", json={**PRICE, "tenant": slug}).json()
    assert price["effective_until"] is None
    ended = operator.post("/admin/prices/end", json=end).json()
    assert ended == {**price, "effective_until": ended["effective_until"]}
    assert datetime.fromisoformat(ended["effective_until"]) == since
    listed = operator.get(f"/admin/prices?tenant={slug}&current=true").json()["data"]
    assert listed == [ended]
    common = operator.get("/admin/prices?own=false").json()["data"]
    assert {price["tenant"] for price in common} <= {None}
    (entry,) = operator.get("/admin/audit?action=price.end").json()["data"]
    assert entry["details"]["id"] == price["id"]
    unknown = operator.post("/admin/prices/end", json={**end, "tenant": "nobody"})
    assert code_of(unknown)[1] == "tenant_not_found"
    assert code_of(operator.get("/admin/prices?tenant=nobody"))[1] == "tenant_not_found"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt_tokens": "1e3"}, "prompt_tokens"),
        ({"prompt_tokens": 0.15}, "prompt_tokens"),
        ({"completion_tokens": "-1"}, "completion_tokens"),
        ({"cached_tokens": "0.16"}, "cached"),
        ({"currency": "eur"}, "currency"),
        ({"batch_discount": 101}, "batch_discount"),
        ({"effective_from": "2020-01-01T00:00:00Z"}, "effective_from"),
        ({"effective_from": "2030-01-01T00:00:00"}, "effective_from"),
    ],
)
def test_what_is_no_price_is_refused(
    operator: httpx.Client, changes: dict[str, Any], param: str
) -> None:
    status, code, named = code_of(operator.post("/admin/prices", json={**PRICE, **changes}))
    assert (status, code, named) == (400, "invalid_parameter", param)


def test_a_price_of_an_unknown_tenant_is_refused(operator: httpx.Client) -> None:
    answer = operator.post("/admin/prices", json={**PRICE, "tenant": "nobody"})
    assert code_of(answer)[1] == "tenant_not_found"


def test_a_tenants_budget_is_set_by_operators_and_seen_by_the_tenant(
    operator: httpx.Client, payer: Caller
) -> None:
    path = f"/admin/tenants/{payer.slug}/budgets"
    budget = operator.put(f"{path}/month", json={"amount": "250"}).json()
    assert (budget["amount"], budget["spent"], budget["remaining"]) == ("250.00", "0.00", "250.00")
    assert (budget["holder"], budget["id"], budget["period"]) == ("tenant", None, "month")
    assert budget["name"] is None
    assert budget["alert_percents"] == [50, 80, 100]
    changed = operator.put(f"{path}/month", json={"amount": "300.5", "alert_percents": []}).json()
    assert (changed["amount"], changed["alert_percents"]) == ("300.50", [])
    assert payer.http.get("/v1/budgets").json()["data"] == [changed]
    assert operator.get(path).json()["data"] == [changed]
    assert operator.delete(f"{path}/month").status_code == 204
    assert code_of(operator.delete(f"{path}/month"))[1] == "budget_not_found"
    actions = [entry["action"] for entry in payer.http.get("/v1/audit").json()["data"]]
    assert actions[:3] == ["budget.remove", "budget.set", "budget.set"]


@pytest.mark.parametrize("amount", ["", "-1", "1e3", "ten", "0.0000000001"])
def test_what_is_no_amount_is_refused(operator: httpx.Client, payer: Caller, amount: str) -> None:
    path = f"/admin/tenants/{payer.slug}/budgets/day"
    status, code, param = code_of(operator.put(path, json={"amount": amount}))
    assert (status, code, param) == (400, "invalid_parameter", "amount")


def test_budgets_and_limits_of_a_key_pass_to_its_successor(payer: Caller) -> None:
    key = payer.http.post("/v1/keys", json={"name": "n", "scopes": ["infer"]}).json()["id"]
    limits = {"requests_per_minute": 7, "concurrent_requests": 2}
    assert payer.http.put(f"/v1/keys/{key}/budgets/day", json={"amount": "5"}).is_success
    assert payer.http.put(f"/v1/keys/{key}/limits", json=limits).is_success
    rotated = payer.http.post(f"/v1/keys/{key}/rotate", json={}).json()["id"]
    budgets = {entry["id"]: entry for entry in payer.http.get("/v1/budgets").json()["data"]}
    assert budgets[rotated]["amount"] == budgets[key]["amount"] == "5.00"
    assert budgets[rotated]["name"] == budgets[key]["name"] == "n"
    assert limits.items() <= payer.http.get(f"/v1/keys/{rotated}/limits").json().items()
    for each in (key, rotated):
        assert payer.http.delete(f"/v1/keys/{each}/budgets/day").status_code == 204


def test_a_budget_and_limits_of_a_user_are_set_by_the_tenants_admin(payer: Caller) -> None:
    body = {"email": "spender@money.example", "role": "developer"}
    user = payer.http.post("/v1/users", json=body).json()["id"]
    budget = payer.http.put(f"/v1/users/{user}/budgets/month", json={"amount": "5"}).json()
    assert (budget["holder"], budget["id"]) == ("user", user)
    assert budget["name"] == "spender@money.example"
    assert payer.http.delete(f"/v1/users/{user}/budgets/month").status_code == 204
    limits = payer.http.put(f"/v1/users/{user}/limits", json={"concurrent_requests": 1}).json()
    assert limits == payer.http.get(f"/v1/users/{user}/limits").json()
    assert payer.http.put(f"/v1/users/{user}/limits", json={}).is_success


def test_budgets_and_limits_of_anothers_key_and_user_are_not_found(
    server: ServerUnderTest, payer: Caller
) -> None:
    other = server.make_caller("money-other")
    key = other.http.post("/v1/keys", json={"name": "n", "scopes": ["infer"]}).json()["id"]
    user = other.http.post("/v1/users", json={"email": "x@y.example", "role": "viewer"}).json()
    for holder, code in (
        (f"/v1/keys/{key}", "key_not_found"),
        (f"/v1/users/{user['id']}", "user_not_found"),
    ):
        answers = [
            payer.http.put(f"{holder}/budgets/day", json={"amount": "5"}),
            payer.http.delete(f"{holder}/budgets/day"),
            payer.http.get(f"{holder}/limits"),
            payer.http.put(f"{holder}/limits", json={}),
        ]
        assert {code_of(answer)[:2] for answer in answers} == {(404, code)}


def test_usage_has_amounts(payer: Caller) -> None:
    model = payer.http.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "x", "max_tokens": 1}
    answer = payer.http.post("/v1/completions", json=body)
    assert answer.is_success
    (day,) = payer.http.get("/v1/usage").json()["data"]
    assert day["amount"] == "0.00", "the served base has no price"
    request_id = answer.headers["x-request-id"]
    record = payer.http.get(f"/v1/usage/requests/{request_id}").json()
    assert (record["price_id"], record["amount"], record["user_id"]) == (None, "0.00", None)
    head = payer.http.get("/v1/usage?format=csv").text.splitlines()[0]
    resources = "step_seconds,kv_byte_seconds,loaded_bytes,fetched_bytes"
    assert head.endswith(f",amount,currency,{resources}")
