"""Two servers on one database and one store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters.states import VersionState
from loraplex.platform.servers import service as servers
from support.server import Caller, ServerUnderTest, serving
from support.waiting import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def second(
    server: ServerUnderTest, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerUnderTest]:
    """Another server beside the one of all tests."""
    settings = server.settings
    with serving(
        tiny_base,
        tmp_path_factory.mktemp("second"),
        *("--served-model-name", "tiny"),
        LORAPLEX_DATABASE=settings.database_url,
        LORAPLEX_STORE=settings.store_url,
        LORAPLEX_SECRET=settings.load_secrets()[0].hex(),
    ) as running:
        yield running


def at(server: ServerUnderTest, caller: Caller) -> Caller:
    """The same caller at another server."""
    there = Caller(server.url, caller.tenant_id, caller.slug, caller.key)
    server.callers.append(there)
    return there


def cached_blocks(server: ServerUnderTest) -> set[str]:
    cache = server.settings.data_dir / "cache"
    return {path.name for path in cache.rglob("*") if path.is_file() and caller_block(path)}


def caller_block(path: Path) -> bool:
    return path.stat().st_size > 0 and path.suffix not in {".json", ".lock"}


def test_both_servers_are_seen(server: ServerUnderTest, second: ServerUnderTest) -> None:
    database = server.database
    with database.platform_transaction(read_only=True) as session:
        seen = servers.list_servers(session)
        assert len([each for each in seen if each.stopped_at is None]) == 2
    database.close()


def test_an_upload_stays_with_the_server_that_has_its_bytes(
    second: ServerUnderTest, caller: Caller, adapters: list[Path]
) -> None:
    weights = (adapters[0] / "adapter_model.safetensors").read_bytes()
    declared = {
        "config": json.loads((adapters[0] / "adapter_config.json").read_text()),
        "size_bytes": len(weights),
        "sha256": hashlib.sha256(weights).hexdigest(),
    }
    here, there = caller, at(second, caller)
    upload = here.http.post("/v1/adapters/bot/uploads", json=declared).json()
    content = f"/v1/uploads/{upload['id']}/content"
    headers = {"content-type": "application/octet-stream"}

    def send(to: Caller, path: str) -> httpx.Response:
        return to.http.put(path, params={"offset": 0}, content=weights, headers=headers)

    assert send(there, content).json()["error"]["code"] == "upload_elsewhere"
    commit = there.http.post(f"/v1/uploads/{upload['id']}/commit")
    assert commit.json()["error"]["code"] == "upload_elsewhere"
    again = there.http.post("/v1/adapters/bot/uploads", json=declared).json()
    assert again["id"] != upload["id"]
    assert send(there, f"/v1/uploads/{again['id']}/content").status_code == 200
    assert send(here, content).status_code == 200
    assert there.http.get(f"/v1/uploads/{upload['id']}").json()["received_bytes"] == len(weights)


def test_any_server_takes_the_rest_of_an_upload_whose_server_was_killed(
    server: ServerUnderTest,
    second: ServerUnderTest,
    caller: Caller,
    adapters: list[Path],
    tiny_base: Path,
    tmp_path: Path,
) -> None:
    weights = (adapters[0] / "adapter_model.safetensors").read_bytes()
    half = len(weights) // 2
    declared = {
        "config": json.loads((adapters[0] / "adapter_config.json").read_text()),
        "size_bytes": len(weights),
        "sha256": hashlib.sha256(weights).hexdigest(),
    }

    def send(to: Caller, upload_id: str, offset: int, content: bytes) -> httpx.Response:
        headers = {"content-type": "application/octet-stream"}
        path = f"/v1/uploads/{upload_id}/content"
        return to.http.put(path, params={"offset": offset}, content=content, headers=headers)

    with serving(
        tiny_base,
        tmp_path / "mortal",
        *("--served-model-name", "tiny"),
        LORAPLEX_DATABASE=server.settings.database_url,
        LORAPLEX_STORE=server.settings.store_url,
        LORAPLEX_SECRET=server.settings.load_secrets()[0].hex(),
    ) as mortal:
        at_mortal = at(mortal, caller)
        upload_id = at_mortal.http.post("/v1/adapters/heir/uploads", json=declared).json()["id"]
        assert send(at_mortal, upload_id, 0, weights[:half]).status_code == 200
        mortal.process.kill()
        mortal.process.wait()
    there = at(second, caller)
    resumed = there.http.post("/v1/adapters/heir/uploads", json=declared).json()
    assert (resumed["id"], resumed["received_bytes"]) == (upload_id, half)
    racing = [caller, there]
    with ThreadPoolExecutor(len(racing)) as threads:
        sent = threads.map(lambda to: send(to, upload_id, half, weights[half:]), racing)
        assert {answer.status_code for answer in sent} <= {200, 409}
        received = caller.http.get(f"/v1/uploads/{upload_id}").json()["received_bytes"]
        assert received == len(weights)
        path = f"/v1/uploads/{upload_id}/commit"
        first, other = threads.map(lambda to: to.http.post(path), racing)
    assert first.status_code == other.status_code == 200, (first.text, other.text)
    assert first.json()["digest"] == other.json()["digest"]
    assert first.json()["version"] == other.json()["version"] == 1
    # The same content, pushed at once, is the same version.
    assert caller.push(adapters[0], "heir")["version"] == 1
    store = server.settings.data_dir / "store"
    assert not [path for path in store.rglob("*") if path.is_file() and upload_id in str(path)]


def test_a_deletion_is_over_when_no_server_holds_the_adapter(
    second: ServerUnderTest, caller: Caller, adapters: list[Path]
) -> None:
    caller.push(adapters[1], "bot")
    there = at(second, caller)
    before = cached_blocks(second)
    body = {"model": "bot", "prompt": "Hi", "max_tokens": 1}
    there.http.post("/v1/completions", json=body).raise_for_status()
    loaded = cached_blocks(second) - before
    assert loaded
    caller.http.delete("/v1/adapters/bot", params={"drain_seconds": 0}).raise_for_status()
    assert not loaded & cached_blocks(second)
    gone = there.http.post("/v1/completions", json=body)
    assert gone.json()["error"]["code"] == "model_not_found"


def test_what_a_dead_server_began_to_delete_is_finished_by_another(
    server: ServerUnderTest, second: ServerUnderTest, caller: Caller, adapters: list[Path]
) -> None:
    caller.push(adapters[2], "bot")
    database = server.database
    with database.transaction(caller.tenant_id) as session:  # and nobody goes on
        catalog.begin_version_deletion(session, "bot", 1)

    def is_deleted() -> bool:
        with database.transaction(caller.tenant_id, read_only=True) as session:
            history = catalog.list_transitions(session, "bot", 1)
            return history[-1].state is VersionState.DELETED

    wait_for(is_deleted, seconds=60)
    with database.transaction(caller.tenant_id, read_only=True) as session:
        assert len(catalog.list_receipts(session, "bot")) == 1
    database.close()
