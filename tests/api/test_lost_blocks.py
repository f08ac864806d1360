"""A version whose block the store lost or damaged: the errors, and the repair."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.store import object_key
from support.http_uploads import WEIGHTS, commit, declaration, open_upload, put
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for


def damage(block: Path) -> None:
    content = bytearray(block.read_bytes())
    content[-1] ^= 1
    block.write_bytes(content)


def truncate(block: Path) -> None:
    block.write_bytes(block.read_bytes()[:-1])


def complete(caller: Caller) -> httpx.Response:
    body = {"model": "bot", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
    return caller.http.post("/v1/completions", json=body)


def block_of(server: ServerUnderTest, version: dict[str, str], caller: Caller) -> Path:
    key = AdapterKey(caller.tenant_id, version["digest"])
    return server.settings.data_dir / "store" / object_key(key)


@pytest.mark.parametrize("harm", [Path.unlink, damage, truncate])
def test_the_same_push_sends_the_bytes_again_and_mends_the_store(
    harm: Callable[[Path], None], server: ServerUnderTest, caller: Caller, adapters: list[Path]
) -> None:
    version = caller.push(adapters[0], "bot")
    block = block_of(server, version, caller)
    whole = block.read_bytes()
    known = caller.http.post("/v1/adapters/bot/uploads", json=declaration(adapters[0]))
    assert known.json()["already"] is True
    harm(block)
    upload = open_upload(caller, adapters[0], "bot")
    put(caller, upload, (adapters[0] / WEIGHTS).read_bytes(), 0)
    assert commit(caller, upload).json()["id"] == version["id"]
    assert block.read_bytes() == whole


def test_a_lost_block_is_no_reason_to_try_again_until_it_is_pushed_again(
    server: ServerUnderTest, caller: Caller, adapters: list[Path]
) -> None:
    version = caller.push(adapters[0], "bot")
    before = complete(caller).json()["choices"]
    block_of(server, version, caller).unlink()
    for cached in (server.settings.data_dir / "cache").rglob("*.block"):
        cached.unlink()
    os.kill(server.engine_pid(), signal.SIGKILL)
    wait_for(lambda: not server.is_ready())
    wait_for(server.is_ready, seconds=120)
    refused = complete(caller)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (503, "adapter_load_failed")
    assert error["retryable"] is False
    assert refused.headers["x-should-retry"] == "false"
    assert "push the same files again" in error["message"]
    assert caller.push(adapters[0], "bot")["id"] == version["id"]
    assert complete(caller).json()["choices"] == before
