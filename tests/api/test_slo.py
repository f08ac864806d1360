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

BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
OF_SERVER = LatencyTargets(2.0, 0.1)


@pytest.fixture
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
