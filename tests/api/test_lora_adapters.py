"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, asked as vLLM's clients ask."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for


@pytest.fixture(scope="module")
def loader(server: ServerUnderTest, adapters: list[Any]) -> Caller:
    """A tenant with the adapters `bot` and `other`."""
    caller = server.make_caller("lora-adapters")
    caller.push(adapters[0], "bot", aliases=["prod"])
    caller.push(adapters[1], "other")
    return caller


def load(caller: Caller, **body: Any) -> httpx.Response:
    return caller.http.post("/v1/load_lora_adapter", json=body)


def unload(caller: Caller, **body: Any) -> httpx.Response:
    return caller.http.post("/v1/unload_lora_adapter", json=body)


def readiness(caller: Caller, name: str) -> dict[str, Any]:
    answer: dict[str, Any] = caller.http.get(f"/v1/adapters/{name}/versions/1/readiness").json()
    return answer


def is_pinned(caller: Caller, name: str) -> bool:
    return [wish["kind"] for wish in readiness(caller, name)["wishes"]] == ["pin"]


@pytest.mark.parametrize("name", ["bot", "bot@prod", "bot@1", "lora-adapters/bot"])
def test_loading_pins_the_version_that_the_name_means_and_unloading_unpins_it(
    loader: Caller, name: str
) -> None:
    answer = load(loader, lora_name=name, lora_path=name)
    assert answer.status_code == 200, answer.text
    assert "lora-adapters/bot@1" in answer.text
    assert is_pinned(loader, "bot")
    wait_for(lambda: readiness(loader, "bot")["tier"] == "device")
    assert load(loader, lora_name=name).status_code == 200  # repeated
    assert unload(loader, lora_name=name, lora_int_id=7).status_code == 200
    assert not is_pinned(loader, "bot")
    assert unload(loader, lora_name=name).status_code == 200


@pytest.mark.parametrize(
    "path", ["/models/bot", "s3://bucket/bot", "https://x.example/bot", "org/b"]
)
def test_a_path_is_refused_and_nothing_is_pinned(loader: Caller, path: str) -> None:
    answer = load(loader, lora_name="other", lora_path=path)
    check_envelope(answer, "unsupported_parameter", "lora_path")
    assert not is_pinned(loader, "other")


def test_what_is_not_pushed_and_the_base_cannot_be_loaded(loader: Caller) -> None:
    for ask in (load, unload):
        check_envelope(ask(loader, lora_name="unknown"), "model_not_found")
        check_envelope(ask(loader, lora_name="tiny"), "adapter_not_found")


def test_no_more_are_loaded_than_a_tenant_may_pin(loader: Caller, adapters: list[Any]) -> None:
    loader.push(adapters[2], "third")
    names = ["bot", "other", "third"]  # the server allows two
    answers = [load(loader, lora_name=name) for name in names]
    assert [answer.status_code for answer in answers[:2]] == [200, 200]
    check_envelope(answers[2], "too_many_pins")
    for name in names:
        assert unload(loader, lora_name=name).status_code == 200


def test_both_are_in_the_audit_log(loader: Caller) -> None:
    load(loader, lora_name="bot")
    unload(loader, lora_name="bot")
    entries = loader.http.get("/v1/audit", params={"limit": 200}).json()["data"]
    of_bot = sorted((e["number"], e["action"]) for e in entries if e["resource"] == "bot@1")
    assert [action for _, action in of_bot[-2:]] == ["version.pin", "version.unpin"]
