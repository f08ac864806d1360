"""A server with an S3 bucket: which process holds the credentials, and outages."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loraplex.api.client import uploads
from loraplex.api.client.errors import ClientError
from support.erasure import check_erasure, needs_proc
from support.fault_proxy import Fault, FaultProxy, fair
from support.http_uploads import WEIGHTS, commit, open_upload, put
from support.processes import descendants
from support.s3 import CREDENTIALS, emulated_s3, make_bucket
from support.server import LORAPLEX, Caller, ServerUnderTest, serving
from support.waiting import wait_for

pytestmark = pytest.mark.slow

SECRET = CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode()


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultProxy]:
    with emulated_s3() as endpoint, FaultProxy(endpoint) as proxy:
        make_bucket(endpoint, "adapters")
        yield proxy


@pytest.fixture(scope="module")
def bucket_server(
    tiny_base: Path, tmp_path_factory: pytest.TempPathFactory, proxy: FaultProxy
) -> Iterator[ServerUnderTest]:
    url = f"s3://adapters/p?endpoint={proxy.url}&addressing_style=path&max_attempts=1"
    folder = tmp_path_factory.mktemp("bucket")
    # A started process, since a forked one's first environment would not hold the credentials.
    with serving(tiny_base, folder, "--store", url, program=LORAPLEX, **CREDENTIALS) as server:
        yield server


@pytest.fixture(scope="module")
def caller(bucket_server: ServerUnderTest, adapters: list[Path]) -> Caller:
    caller = bucket_server.make_caller("acme")
    caller.push(adapters[0], "bot")
    return caller


@needs_proc
def test_no_process_holds_an_erased_adapter_that_came_from_a_bucket(
    bucket_server: ServerUnderTest, tiny_base: Path, tmp_path: Path
) -> None:
    check_erasure(bucket_server, bucket_server.make_caller("erased"), tmp_path, tiny_base)


def complete(caller: Caller, model: str = "bot") -> httpx.Response:
    body = {"model": model, "prompt": "Hello", "max_tokens": 4, "temperature": 0}
    return caller.http.post("/v1/completions", json=body)


def fetchers(server: ServerUnderTest) -> list[int]:
    children = descendants(server.process.pid)
    return [pid for pid, line in children.items() if "loraplex.adapters.fetcher_process" in line]


def fetcher_pid(server: ServerUnderTest) -> int:
    (pid,) = fetchers(server)
    return pid


def environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def test_only_the_fetcher_process_has_the_stores_credentials(
    bucket_server: ServerUnderTest, caller: Caller
) -> None:
    assert complete(caller).is_success
    assert SECRET in environment(fetcher_pid(bucket_server))
    assert SECRET not in environment(bucket_server.process.pid)
    engine = environment(bucket_server.engine_pid())
    assert SECRET not in engine
    assert b"AWS_" not in engine


def test_adapters_in_memory_answer_while_the_store_is_down(
    caller: Caller, adapters: list[Path], proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "FIRST_PAUSE_SECONDS", 0.05)
    before = complete(caller)
    assert before.is_success
    proxy.is_down = True
    try:
        during = complete(caller)
        listed = caller.http.get("/v1/models")
        with pytest.raises(ClientError, match="store_unavailable"):
            caller.push(adapters[1], "second")
    finally:
        proxy.is_down = False
    assert during.json()["choices"] == before.json()["choices"]
    assert listed.is_success
    caller.push(adapters[1], "second")
    assert complete(caller, "second").is_success


def test_a_push_that_the_store_acknowledges_and_does_not_keep_may_be_tried_again(
    caller: Caller, adapters: list[Path], proxy: FaultProxy
) -> None:
    upload = open_upload(caller, adapters[2], "third")
    put(caller, upload, (adapters[2] / WEIGHTS).read_bytes(), 0)
    proxy.weather = lambda request: Fault.UNKEPT if request.method == "PUT" else None
    try:
        refused = commit(caller, upload)
    finally:
        proxy.weather = fair
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "store_unavailable"
    assert refused.json()["error"]["retryable"] is True
    caller.push(adapters[2], "third")
    assert complete(caller, "third").is_success


def test_a_killed_fetcher_is_replaced_and_nobody_notices(
    bucket_server: ServerUnderTest, caller: Caller
) -> None:
    pid = fetcher_pid(bucket_server)
    os.kill(pid, signal.SIGKILL)
    assert complete(caller).is_success
    wait_for(lambda: fetchers(bucket_server) not in ([], [pid]))
    assert complete(caller).is_success
    assert SECRET in environment(fetcher_pid(bucket_server))
