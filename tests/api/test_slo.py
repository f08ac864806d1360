"""Targets of tenants and of requests, over HTTP and as the engine gets them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from loraplex.api.contract.errors import ApiError
from loraplex.api.inference.objective import Objective, objective_of
from loraplex.engine.messages import NO_TARGETS, LatencyTargets
from loraplex.platform.errors import InvalidValue
from loraplex.platform.tenants.slo import NO_SLO, Slo
from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for

BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
OF_SERVER = LatencyTargets(2.0, 0.1)


@pytest.fixture(scope="module")
def admin(server: ServerUnderTest) -> Iterator[httpx.Client]:
    key = server.make_operator("admin-of-slos")
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        yield client


def order(targets: LatencyTargets = NO_TARGETS, slo: Slo = NO_SLO) -> Any:
    """As much of an order as its objective depends on."""
    return SimpleNamespace(targets=targets, principal=SimpleNamespace(tenant_slo=slo))


@pytest.mark.parametrize(
    ("targets", "slo", "expected"),
    [
        (NO_TARGETS, NO_SLO, Objective(OF_SERVER, "server")),
        (NO_TARGETS, Slo(itl_ms=20), Objective(LatencyTargets(2.0, 0.02), "tenant")),
        (NO_TARGETS, Slo(5000, 500), Objective(LatencyTargets(5.0, 0.5), "tenant")),
        (LatencyTargets(3.0), NO_SLO, Objective(LatencyTargets(3.0, 0.1), "request")),
        (LatencyTargets(0.5), Slo(500, 20), Objective(LatencyTargets(0.5, 0.02), "request")),
    ],
)
def test_each_target_is_the_requests_else_the_tenants_else_the_servers(
    targets: LatencyTargets, slo: Slo, expected: Objective
) -> None:
    assert objective_of(order(targets, slo), OF_SERVER) == expected


@pytest.mark.parametrize(
    ("targets", "slo", "of_server", "param"),
    [
        (LatencyTargets(1.9), NO_SLO, OF_SERVER, "slo.ttft_ms"),
        (LatencyTargets(2.0, 0.09), NO_SLO, OF_SERVER, "slo.itl_ms"),
        (LatencyTargets(2.5), Slo(3000), OF_SERVER, "slo.ttft_ms"),
        (LatencyTargets(60.0), NO_SLO, NO_TARGETS, "slo.ttft_ms"),
        (LatencyTargets(None, 60.0), Slo(1.0), NO_TARGETS, "slo.itl_ms"),
    ],
)
def test_no_request_has_a_stricter_target_than_its_tenant(
    targets: LatencyTargets, slo: Slo, of_server: LatencyTargets, param: str
) -> None:
    with pytest.raises(ApiError) as refused:
        objective_of(order(targets, slo), of_server)
    assert (refused.value.code, refused.value.param) == ("slo_too_strict", param)


@pytest.mark.parametrize("slo", [Slo(0.9), Slo(4e6), Slo(None, 0.01), Slo(None, 70_000)])
def test_a_target_out_of_range_is_none(slo: Slo) -> None:
    with pytest.raises(InvalidValue):
        slo.check()


def test_a_request_may_relax_its_tenants_targets_and_not_tighten_them(
    caller: Caller, admin: httpx.Client
) -> None:
    asked = {**BODY, "slo": {"ttft_ms": 60_000}}
    check_envelope(caller.http.post("/v1/completions", json=asked), "slo_too_strict", "slo.ttft_ms")
    path = f"/admin/tenants/{caller.slug}"
    promised = {"ttft_ms": 50_000, "itl_ms": 20_000}
    assert admin.patch(path, json={"slo": promised}).status_code == 200
    assert caller.http.post("/v1/completions", json=asked).status_code == 200
    asked["slo"] = {"itl_ms": 19_999}
    refused = caller.http.post("/v1/completions", json=asked)
    check_envelope(refused, "slo_too_strict", "slo.itl_ms")
    text = httpx.get(f"{caller.url}/metrics").text
    assert 'loraplex_slo_sequences_total{result="met",set_by="request"}' in text


def test_an_overview_has_the_attained_share_of_the_tenant_and_of_all(
    server: ServerUnderTest, admin: httpx.Client
) -> None:
    caller = server.make_caller("attaining")
    path = f"/admin/tenants/{caller.slug}"
    for ttft_ms, num_requests in ((600_000, 3), (1, 1)):
        assert admin.patch(path, json={"slo": {"ttft_ms": ttft_ms}}).status_code == 200
        for _ in range(num_requests):
            assert caller.http.post("/v1/completions", json=BODY).status_code == 200

    def overview() -> dict[str, Any]:
        view: dict[str, Any] = caller.http.get("/v1/overview", params={"range": "15m"}).json()
        return view

    wait_for(lambda: sum(each["met"] + each["ttft"] for each in overview()["objectives"]) == 4)
    own = overview()
    of_tenant = {"met": 3, "ttft": 1, "itl": 0, "refused": 0, "failed": 0, "attained_share": 0.75}
    assert own["objectives"] == [{"set_by": "tenant", **of_tenant}]
    judged = [share for share in own["series"]["attained_share"] if share is not None]
    assert judged
    assert all(0 <= share <= 1 for share in judged)
    met = sum(rate or 0 for rate in own["series"]["goodput_per_second"][:-1]) * own["step_seconds"]
    assert met <= 3.01
    platform = admin.get("/admin/overview", params={"range": "15m"}).json()
    (load,) = [each for each in platform["tenants"] if each["tenant"] == caller.slug]
    assert load["attained_share"] == 0.75
    of_all = {each["set_by"]: each for each in platform["objectives"]}
    assert of_all["tenant"]["met"] >= 3
