"""Several adapters in one request: the API, the ledger, keys and deletion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.platform.keys.principal import Scope
from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for

COMPOSITION = "bot@1+polite:0.5"


@pytest.fixture(scope="module")
def composer(server: ServerUnderTest, adapters: list[Path]) -> Caller:
    """A tenant with the adapters `bot` and `polite`."""
    caller = server.make_caller("composer")
    for name, folder in zip(("bot", "polite"), adapters, strict=False):
        caller.push(folder, name, aliases=["prod"])
    return caller


def complete(caller: Caller, model: str, **body: Any) -> httpx.Response:
    asked = {"model": model, "prompt": "hi", "max_tokens": 6, "temperature": 0, **body}
    return caller.http.post("/v1/completions", json=asked)


def text_of(answer: httpx.Response) -> str:
    assert answer.is_success, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_headers_and_usage_name_all_adapters(composer: Caller) -> None:
    answer = complete(composer, COMPOSITION)
    text_of(answer)
    assert answer.headers["x-loraplex-adapter"] == "composer/bot@1+composer/polite@1:0.5"
    assert "x-loraplex-adapter-version" not in answer.headers
    alone = complete(composer, "bot")
    digest = answer.headers["x-loraplex-digest"]
    assert digest.startswith("sha256:")
    assert digest != alone.headers["x-loraplex-digest"]
    assert answer.json()["model"] == answer.headers["x-loraplex-adapter"]
    record = composer.http.get(f"/v1/usage/requests/{answer.headers['x-request-id']}").json()
    assert (record["adapter"], record["version"], record["digest"]) == ("bot", 1, digest)
    assert record["composition"] == answer.headers["x-loraplex-adapter"]
    other = composer.http.get(f"/v1/usage/requests/{alone.headers['x-request-id']}").json()
    assert other["composition"] is None


def test_names_aliases_and_fields_mean_the_same_composition(composer: Caller) -> None:
    polite = {"model": "polite@latest", "weight": 0.5}
    answers = [
        complete(composer, COMPOSITION),
        complete(composer, "polite@prod:0.5+composer/bot"),
        complete(composer, "bot", adapters=[polite]),
        complete(composer, "tiny", adapters=[polite, {"model": "bot"}]),
    ]
    assert len({answer.headers["x-loraplex-digest"] for answer in answers}) == 1
    assert len(set(map(text_of, answers))) == 1


def test_every_route_composes(composer: Caller) -> None:
    hi = {"role": "user", "content": "hi"}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [hi], "max_tokens": 3},
        "/v1/responses": {"input": "hi", "max_output_tokens": 3},
        "/v1/messages": {"messages": [hi], "max_tokens": 3},
        "/v1/embeddings": {"input": "hi"},
    }
    digest = complete(composer, COMPOSITION).headers["x-loraplex-digest"]
    for path, body in bodies.items():
        half = {"model": "polite", "weight": 0.5}
        asks: tuple[dict[str, Any], ...] = (
            {"model": COMPOSITION},
            {"model": "bot", "adapters": [half]},
        )
        for asked in asks:
            answer = composer.http.post(path, json={**asked, **body})
            assert answer.is_success, answer.text
            assert answer.headers["x-loraplex-digest"] == digest, path


@pytest.mark.parametrize(
    ("model", "added", "code"),
    [
        ("bot+bot:0.5", [], "invalid_composition"),
        ("bot:3", [], "invalid_composition"),
        ("bot", [{"model": "bot@1"}], "invalid_composition"),
        ("bot+polite", [{"model": "bot"}] * 3, "invalid_composition"),
        ("bot", [{"model": "polite", "weight": 2.5}], "invalid_parameter"),
        ("bot+nobody", [], "model_not_found"),
        ("bot+resident/bot", [], "model_not_found"),
        ("bot+tiny", [], "model_not_found"),
        ("bot+", [], "model_not_found"),
        ("bot:x", [], "model_not_found"),
    ],
)
def test_what_is_no_composition_is_refused(
    composer: Caller, model: str, added: list[dict[str, Any]], code: str
) -> None:
    answer = complete(composer, model, adapters=added)
    assert answer.json()["error"]["code"] == code, answer.text


def test_a_key_without_the_scope_names_one_adapter(
    server: ServerUnderTest, adapters: list[Path]
) -> None:
    caller = server.make_caller("plain-caller", [s for s in Scope if s != Scope.ADAPTERS_COMPOSE])
    caller.push(adapters[0], "bot")
    assert complete(caller, "bot").is_success
    check_envelope(complete(caller, "bot:0.5"), "insufficient_scope")


def test_a_composition_is_no_adapter_to_be_loaded_or_unloaded(composer: Caller) -> None:
    answer = composer.http.post("/v1/unload_lora_adapter", json={"lora_name": COMPOSITION})
    assert answer.status_code == 404, answer.text


@pytest.mark.slow
def test_with_a_member_the_composition_ends(server: ServerUnderTest, adapters: list[Path]) -> None:
    caller = server.make_caller("leaver")
    for name, folder in zip(("bot", "polite"), adapters, strict=False):
        caller.push(folder, name)
    assert complete(caller, "bot+polite").is_success

    def residents() -> list[list[str]]:
        shown = caller.http.get("/v1/memory").json()["servers"][0]["device"]["extents"]
        return [sorted(extent["names"]) for extent in shown]

    wait_for(lambda: ["bot@1", "polite@1"] in residents())
    assert caller.http.delete("/v1/adapters/polite").is_success
    check_envelope(complete(caller, "bot+polite"), "model_not_found")
    wait_for(lambda: residents() == [["bot@1"]])
    assert complete(caller, "bot").is_success


def test_the_memory_view_tells_a_composition_from_adapters_of_one_content(
    server: ServerUnderTest, adapters: list[Path]
) -> None:
    caller = server.make_caller("mixer")
    for name, folder in (("bot", adapters[0]), ("again", adapters[0]), ("polite", adapters[1])):
        caller.push(folder, name)
    assert complete(caller, "bot+polite:0.5").is_success

    def extents() -> list[dict[str, Any]]:
        memory = caller.http.get("/v1/memory").json()["servers"][0]
        listed: list[dict[str, Any]] = memory["device"]["extents"]
        return listed

    def composed() -> list[dict[str, Any]]:
        return [extent for extent in extents() if extent["composition"] is not None]

    (extent,) = wait_for(composed)
    assert set(extent["composition"].split("+")) == {"again@1", "polite@1:0.5"}
    assert set(extent["names"]) == {"again@1", "bot@1", "polite@1"}
    adapters_alone = [set(each["names"]) for each in extents() if each["composition"] is None]
    assert {"again@1", "bot@1"} in adapters_alone
