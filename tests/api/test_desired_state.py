"""Pinned adapters are reloaded without a request."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.server import Caller, ServerUnderTest, serving
from support.waiting import wait_for

PIN = "/v1/adapters/bot/versions/1/pin"


def is_on_device(caller: Caller) -> bool:
    answer = caller.http.get("/v1/adapters/bot/versions/1")
    return answer.is_success and answer.json()["tier"] == "device"


@pytest.mark.slow
def test_pinned_adapters_are_resident_again_after_a_killed_engine_and_a_new_server(
    tiny_base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    with serving(tiny_base, tmp_path) as server:
        caller = server.make_caller("acme")
        caller.push(adapters[0], "bot")
        caller.push(adapters[1], "unpinned")
        assert caller.http.put(PIN, json={}).status_code == 202
        wait_for(lambda: is_on_device(caller), seconds=60)

        killed = server.engine_pid()
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: _has_new_engine(server, killed), seconds=60)
        wait_for(lambda: is_on_device(caller), seconds=60)

    with serving(tiny_base, tmp_path) as server:
        again = Caller(server.url, caller.tenant_id, caller.slug, caller.key)
        server.callers.append(again)
        wait_for(lambda: is_on_device(again), seconds=60)
        answer = again.http.get("/v1/adapters/unpinned/versions/1")
        assert answer.json()["tier"] != "device", "nobody has asked for it since the start"


def _has_new_engine(server: ServerUnderTest, killed: int) -> bool:
    try:
        return server.engine_pid() != killed and server.is_ready()
    except ValueError:  # between two lives there is none
        return False
