"""A store that damages, delays and refuses responses can only make loads fail."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.errors import AdapterError, StoreUnavailable
from loraplex.adapters.fetcher import MAX_TRANSFERS_OF_TENANT, FetchedBlock
from loraplex.adapters.fetcher_client import FetcherClient
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.store import object_key
from loraplex.adapters.store.s3 import PART_BYTES
from loraplex.adapters.tier import Tier
from support.fault_proxy import READ_FAULTS, Fault, FaultProxy, fair
from support.faulty_loads import run_faulty_loads
from support.s3 import emulated_s3, fetcher_environment_for_tests, make_bucket
from support.waiting import wait_for

NUM_FAULTY_LOADS = 100
"""`make adapter-evidence` takes a thousand."""
NUM_SLOW = MAX_TRANSFERS_OF_TENANT
NUM_OBJECTS = max(24, NUM_SLOW)
NUM_FIRST_REQUESTS = 500
TIMEOUT = 120.0


def make_key(index: int) -> AdapterKey:
    return AdapterKey("tenant", f"sha256:{index:064x}")


def content(index: int) -> bytes:
    return f"content {index}".encode() * 500


def url_path(index: int) -> str:
    return f"/adapters/{object_key(make_key(index))}"


def submit(client: FetcherClient, index: int) -> Future[FetchedBlock]:
    sha256 = hashlib.sha256(content(index)).hexdigest()
    return client.fetch(make_key(index), sha256=sha256, size_bytes=len(content(index)))


def fetch(client: FetcherClient, index: int) -> FetchedBlock:
    return submit(client, index).result(TIMEOUT)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with emulated_s3() as endpoint:
        bucket = make_bucket(endpoint, "adapters")
        for index in range(NUM_OBJECTS):
            bucket.put_object(Key=object_key(make_key(index)), Body=content(index))
        yield endpoint


@pytest.fixture
def proxy(endpoint: str) -> Iterator[FaultProxy]:
    with FaultProxy(endpoint) as proxy:
        yield proxy


@pytest.fixture
def make_client(proxy: FaultProxy, tmp_path: Path) -> Iterator[Callable[..., FetcherClient]]:
    clients: list[FetcherClient] = []

    def make(options: str = "read_timeout=60", **parameters: Any) -> FetcherClient:
        client = FetcherClient(
            store_url=f"s3://adapters?endpoint={proxy.url}&addressing_style=path&{options}",
            cache_directory=tmp_path / "cache",
            capacity_bytes=1 << 30,
            environment=fetcher_environment_for_tests(),
            **parameters,
        )
        clients.append(client)
        client.start()
        return client

    yield make
    for client in clients:
        client.close()


@pytest.mark.slow
def test_faulty_loads_hand_out_no_corrupt_block() -> None:
    counts = run_faulty_loads(NUM_FAULTY_LOADS, seed=0)
    assert counts.tried == NUM_FAULTY_LOADS
    assert counts.corrupt_served == 0
    assert counts.corrupt_files == 0
    assert counts.uncoded == 0
    assert counts.recovered == counts.objects
    # Every kind of fault came, and neither all loads failed nor none.
    assert set(counts.faults) == set(READ_FAULTS)
    assert counts.succeeded
    assert counts.failed.total() == NUM_FAULTY_LOADS - counts.succeeded


def test_five_hundred_first_requests_cause_one_download(
    make_client: Callable[..., FetcherClient], proxy: FaultProxy
) -> None:
    client = make_client()
    proxy.answer_together(2)  # so that the download is under way until we say so
    requests = [submit(client, 1) for _ in range(NUM_FIRST_REQUESTS)]
    # The calls are taken in order: what came before this answer has joined the download.
    assert not client.store.exists(object_key(make_key(99)))
    proxy.answer_together(0)
    blocks = [request.result(TIMEOUT) for request in requests]
    assert {block.path.read_bytes() for block in blocks} == {content(1)}
    assert {block.tier for block in blocks} == {Tier.STORE}
    assert proxy.num_requests["GET", url_path(1)] == 1


def test_a_tenants_slow_loads_are_under_way_together(
    make_client: Callable[..., FetcherClient], proxy: FaultProxy
) -> None:
    client = make_client()
    proxy.answer_together(NUM_SLOW)  # none is answered before all have been asked for
    requests = [submit(client, index) for index in range(NUM_SLOW)]
    contents = [request.result(TIMEOUT).path.read_bytes() for request in requests]
    assert contents == [content(index) for index in range(NUM_SLOW)]
    assert proxy.most_open == NUM_SLOW


def test_a_load_that_trickles_in_ends_at_its_deadline(
    make_client: Callable[..., FetcherClient], proxy: FaultProxy
) -> None:
    client = make_client(transfer_seconds=1.0)
    proxy.plan(url_path(1), [Fault.TRICKLE] * 2)
    with pytest.raises(StoreUnavailable, match="too slow"):
        fetch(client, 1)


DAMAGES = (Fault.BIT_FLIP, Fault.WRONG_OBJECT, Fault.OTHER_OBJECT, Fault.SHORT, Fault.LONG)


def test_a_damaged_answer_is_told_from_one_that_is_missing(
    make_client: Callable[..., FetcherClient], proxy: FaultProxy
) -> None:
    client = make_client()
    assert outcome(client, 2) == "served"
    for index, fault in enumerate(DAMAGES, start=3):
        proxy.plan(url_path(index), [fault] * 2)
        assert outcome(client, index) == "object_corrupt", fault
        proxy.plan(url_path(index), [fault])
        assert outcome(client, index) == "served", fault


CODES = {
    Fault.DENIED: "store_denied",
    Fault.MISSING: "object_not_found",
    Fault.SERVER_ERROR: "store_unavailable",
    Fault.SLOW_DOWN: "store_unavailable",
    Fault.RESET_WITHIN: "store_unavailable",
    Fault.TRUNCATED: "store_unavailable",
}


def test_a_refused_or_broken_answer_has_the_code_of_its_reason(
    make_client: Callable[..., FetcherClient], proxy: FaultProxy
) -> None:
    client = make_client("max_attempts=1")
    for index, (fault, code) in enumerate(CODES.items(), start=1):
        proxy.plan(url_path(index), [fault] * 2)
        assert outcome(client, index) == code, fault


def test_a_write_that_is_acknowledged_and_not_kept_is_found_out(
    make_client: Callable[..., FetcherClient], proxy: FaultProxy, tmp_path: Path
) -> None:
    client = make_client("max_attempts=1")
    block = tmp_path / "block"
    block.write_bytes(content(1))
    key, sha256 = object_key(make_key(98)), hashlib.sha256(content(1)).hexdigest()
    proxy.weather = lambda request: Fault.UNKEPT if request.method == "PUT" else None
    with pytest.raises(StoreUnavailable, match="did not keep"):
        client.store.put_file(key, block, sha256=sha256)
    proxy.weather = fair
    client.store.put_file(key, block, sha256=sha256)
    assert client.store.exists(key)


def test_a_redirect_to_another_bucket_is_not_followed(
    make_client: Callable[..., FetcherClient], proxy: FaultProxy
) -> None:
    client = make_client("max_attempts=1")
    with FaultProxy(proxy.url) as elsewhere:
        proxy.redirect_to = f"{elsewhere.url}{url_path(1)}"
        proxy.plan(url_path(1), [Fault.REDIRECT] * 10)
        assert outcome(client, 1) == "store_unavailable"
        assert not elsewhere.num_requests


def test_what_is_on_the_disk_is_handed_out_while_the_store_is_down(
    make_client: Callable[..., FetcherClient], proxy: FaultProxy
) -> None:
    client = make_client("max_attempts=1")
    fetch(client, 1)
    proxy.is_down = True
    assert fetch(client, 1).tier is Tier.DISK
    assert outcome(client, 2) == "store_unavailable"
    proxy.is_down = False
    assert outcome(client, 2) == "served"


def test_an_upload_goes_on_where_a_killed_process_left_it(
    make_client: Callable[..., FetcherClient], proxy: FaultProxy, tmp_path: Path
) -> None:
    client = make_client()
    large = tmp_path / "large"
    large.write_bytes(hashlib.shake_128(b"large").digest(2 * PART_BYTES + 1000))
    sha256 = hashlib.sha256(large.read_bytes()).hexdigest()
    key = object_key(make_key(999))

    def kill(_sent_bytes: int) -> None:
        if client.pid is not None:
            os.kill(client.pid, signal.SIGKILL)

    with pytest.raises(StoreUnavailable):
        client.store.put_file(key, large, sha256=sha256, on_progress=kill)
    wait_for(lambda: client.stats().num_restarts and client.pid)
    client.store.put_file(key, large, sha256=sha256)
    assert proxy.part_numbers.count(1) == 1, "what had arrived was not sent again"
    assert proxy.part_numbers[-1] == 3
    copy = tmp_path / "copy"
    client.store.fetch_file(key, copy, sha256=sha256, size_bytes=large.stat().st_size)


def test_a_process_told_to_stop_while_it_loads_answers_everyone(
    make_client: Callable[..., FetcherClient], proxy: FaultProxy
) -> None:
    client = make_client()
    proxy.answer_together(2)
    with closing(client):
        request = submit(client, 1)
        assert not request.done()
    with pytest.raises(StoreUnavailable):
        request.result(TIMEOUT)


def outcome(client: FetcherClient, index: int) -> str:
    """`served`, or the code of the failure."""
    try:
        block = fetch(client, index)
    except AdapterError as exc:
        return exc.code
    assert block.path.read_bytes() == content(index)
    return "served"
