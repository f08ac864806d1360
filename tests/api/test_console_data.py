"""The console's data: lists, time series, memory maps, settings."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for


@pytest.fixture(scope="module")
def admin(server: ServerUnderTest) -> Iterator[httpx.Client]:
    """An operator's key."""
    key = server.make_operator("console-data")
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60.0) as client:
        yield client


@pytest.fixture(scope="module")
def busy(server: ServerUnderTest, adapters: list[Path]) -> Caller:
    """A tenant whose adapter has answered two requests, and whose base one; one was refused."""
    caller = server.make_caller("console-busy")
    caller.push(adapters[0], "bot", aliases=["prod"])
    for model in ("bot", "bot", "tiny", "no-such"):
        body = {"model": model, "prompt": "Hi there", "max_tokens": 4, "ignore_eos": True}
        caller.http.post("/v1/completions", json=body)
    return caller


def test_a_list_tells_what_an_adapter_is_and_how_it_is_used(
    busy: Caller, admin: httpx.Client
) -> None:
    def listed() -> dict[str, Any]:
        (entry,) = busy.http.get("/v1/adapters").json()["data"]
        found: dict[str, Any] = entry
        return found

    def is_told() -> bool:
        busy.http.get("/v1/overview").raise_for_status()  # what was measured is written down
        entry = listed()
        return entry["p95_ms"] is not None and (entry["requests"], entry["tier"]) == (2, "device")

    wait_for(is_told)
    entry, version = listed(), busy.http.get("/v1/adapters/bot/versions/1").json()
    assert (entry["id"], entry["tenant"]) == ("console-busy/bot", "console-busy")
    assert (entry["num_versions"], entry["latest_version"], entry["state"]) == (1, 1, "ready")
    assert entry["aliases"] == {"prod": 1}
    assert entry["rank"] == version["report"]["max_rank"]
    assert entry["effect"] == version["attestation"]["max_logit_delta"]
    assert entry["bytes"] == version["size_bytes"]
    assert entry["tier"] == "device"
    assert entry["p95_ms"] > 0
    assert entry["last_used"] is not None
    of_all = admin.get("/admin/adapters", params={"tenant": "console-busy"}).json()["data"]
    assert of_all == [entry]
    for query in ({"sort": "size"}, {"state": "gone"}, {"search": ""}, {"after": "x"}):
        answer = busy.http.get("/v1/adapters", params=query)
        check_envelope(answer, "invalid_parameter", next(iter(query)))


def test_an_overview_adds_up_what_was_asked(
    busy: Caller, admin: httpx.Client, make_caller: Callable[[], Caller]
) -> None:
    def sums(view: dict[str, Any]) -> dict[str, float]:
        """Each series over the steps that are over, times their length."""
        return {
            name: sum(value or 0.0 for value in series[:-1]) * view["step_seconds"]
            for name, series in view["series"].items()
        }

    def own() -> dict[str, Any]:
        found: dict[str, Any] = busy.http.get("/v1/overview", params={"range": "15m"}).json()
        return found

    wait_for(lambda: round(sums(own())["requests_per_second"]) >= 4, seconds=40)
    view, added = own(), sums(own())
    assert round(added["requests_per_second"]) == 4
    assert round(added["errors_per_second"]) == 1
    assert round(added["output_tokens_per_second"]) == 12
    assert added["prompt_tokens_per_second"] > 0
    assert len(view["times"]) == 60
    assert {len(series) for series in view["series"].values()} == {60}
    assert any(view["series"]["ttft_p95_ms"])
    assert any(view["series"]["itl_p50_ms"])
    assert max(value or 0 for value in view["series"]["adapter_device_bytes"]) > 0
    assert view["now"]["arena_bytes"] is None, "it tells of others"
    platform = admin.get("/admin/overview", params={"range": "15m"}).json()
    part = {each["tenant"]: each for each in platform["tenants"]}["console-busy"]
    assert 0 < part["share"] <= 1
    assert part["weight"] == 1.0
    assert round(sum(part["output_tokens_per_second"][:-1]) * 15) == 12
    assert platform["now"]["num_servers"] == 1
    idle = make_caller().http.get("/v1/overview").json()
    assert sums(idle)["requests_per_second"] == 0
    assert idle["now"]["adapter_device_bytes"] == 0


@pytest.mark.parametrize("name", ["15m", "1h", "6h", "24h", "7d"])
def test_every_range_has_at_most_120_steps_that_follow_each_other(
    name: str, busy: Caller, admin: httpx.Client
) -> None:
    for answer in (
        busy.http.get("/v1/overview", params={"range": name}),
        admin.get("/admin/overview", params={"range": name}),
    ):
        view = answer.json()
        assert view["range"] == name
        assert 50 <= len(view["times"]) <= 120
        assert view["times"] == sorted(set(view["times"]))


def test_a_map_shows_an_operator_everything_and_a_tenant_its_own(
    busy: Caller, admin: httpx.Client, make_caller: Callable[[], Caller], adapters: list[Path]
) -> None:
    other = make_caller()
    other.push(adapters[1], "theirs")
    other.push(adapters[1], "again")
    (seen,) = admin.get("/admin/memory").json()["servers"]
    assert any("adapter arena" in line for line in seen["plan"])
    device = seen["device"]
    assert device["used_bytes"] + device["free_bytes"] == device["arena_bytes"]
    by_tenant = {extent["tenant"]: extent for extent in device["extents"]}
    assert {"console-busy", other.slug} <= set(by_tenant)
    mine = by_tenant["console-busy"]
    assert (mine["adapter"], mine["version"], mine["names"]) == ("bot", 1, ["bot@1"])
    shared = by_tenant[other.slug]
    assert (shared["adapter"], shared["names"]) == ("again", ["again@1", "theirs@1"])
    assert (mine["state"], mine["leases"]) == ("idle", 0)
    ends = [(extent["offset"], extent["offset"] + extent["bytes"]) for extent in device["extents"]]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))
    kv = seen["kv"]
    assert kv["free_blocks"] + kv["cached_blocks"] + kv["used_blocks"] == kv["num_blocks"]
    for tier in ("host", "disk"):
        assert any(entry["tenant"] == "console-busy" for entry in seen[tier]["entries"])
    (own,) = busy.http.get("/v1/memory").json()["servers"]
    assert own["plan"] == []
    shown = {**mine, "offset": None, "eviction_order": None}
    (extent,) = own["device"]["extents"]
    assert {**extent, "idle_seconds": 0} == {**shown, "idle_seconds": 0}
    for tier in ("host", "disk"):
        assert [entry["tenant"] for entry in own[tier]["entries"]] == ["console-busy"]
    text = busy.http.get("/v1/memory").text
    assert other.slug not in text
    assert other.http.get("/v1/adapters/theirs").json()["versions"][0]["digest"] not in text
    totals = [own["device"][name] for name in ("arena_bytes", "free_bytes", "fragmentation")]
    assert totals == [None, None, None]


def test_settings_are_shown_with_where_they_come_from_and_secrets_are_not(
    admin: httpx.Client, server: ServerUnderTest
) -> None:
    answer = admin.get("/admin/settings")
    found = {entry["name"]: entry for entry in answer.json()["data"]}
    pins = found["LORAPLEX_MAX_PINS"]
    assert (pins["value"], pins["source"]) == ("2", "environment")
    assert pins["origin"] == pins["variable"] == "LORAPLEX_MAX_PINS"
    name = found["LORAPLEX_SERVED_MODEL_NAME"]
    assert (name["value"], name["source"]) == ("tiny", "flag")
    assert name["origin"] == name["flag"] == "--served-model-name"
    assert name["variable"] == "LORAPLEX_SERVED_MODEL_NAME"
    stale = found["LORAPLEX_STALE_SECONDS"]
    assert (stale["source"], stale["origin"]) == ("default", None)
    secret = found["LORAPLEX_SECRET"]
    assert (secret["value"], secret["source"]) == ("set", "file")
    assert secret["origin"].endswith("/secret")
    assert found["LORAPLEX_SECRET_PREVIOUS"]["value"] == "not set"
    assert found["engine.num_threads"]["value"] == "1"
    assert found["engine.max_num_seqs"]["source"] == "default"
    window = found["engine.attention_window"]
    assert (window["value"], window["unset"]) == (None, "all")
    memory = found["engine.memory_bytes"]
    assert (memory["flag"], memory["variable"]) == ("--memory-gib", "LORAPLEX_MEMORY_GIB")
    assert [entry["name"] for entry in found.values() if not entry["description"]] == []
    assert server.settings.load_secrets()[0].hex() not in answer.text


def test_usage_comes_as_csv_also_where_no_header_can_be_sent(
    busy: Caller, admin: httpx.Client
) -> None:
    for client, path in ((busy.http, "/v1/usage"), (admin, "/admin/usage")):
        answer = client.get(path, params={"format": "csv", "group_by": "adapter"})
        assert answer.headers["content-type"].startswith("text/csv")
        head, *rows = csv.reader(io.StringIO(answer.text))
        assert head[:2] == ["adapter", "requests"]
        assert rows
        headers = {"accept": "text/csv"}
        assert client.get(path, params={"format": "json"}, headers=headers).json()["data"]
