from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex.adapters.errors import (
    AdapterUnavailable,
    ObjectCorrupt,
    ObjectNotFound,
    StoreUnavailable,
)
from loraplex.adapters.fetcher import FetchedBlock
from loraplex.adapters.fetcher_client import FetcherClient
from loraplex.adapters.fetcher_environment import (
    ZEROED_MEMORY,
    fetcher_environment,
    take_credentials,
)
from loraplex.adapters.fetcher_messages import (
    Delete,
    Fetch,
    PutFile,
    ToFetcher,
    decode_from_fetcher,
    decode_to_fetcher,
    encode,
)
from loraplex.adapters.fetcher_process import NUM_STORE_THREADS, FetcherService
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.json_frames import MAX_MESSAGE_BYTES, Inbox, MessageRefused
from loraplex.adapters.store import object_key
from loraplex.adapters.store.local import LocalStore
from loraplex.adapters.tier import Tier
from support.waiting import wait_for

KEY = AdapterKey("tenant", "sha256:" + "a" * 64)
CONTENT = b"block" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
TIMEOUT = 60.0


@pytest.fixture
def make_client(tmp_path: Path) -> Iterator[Callable[..., FetcherClient]]:
    clients: list[FetcherClient] = []

    def make(**changes: Any) -> FetcherClient:
        parameters: dict[str, Any] = {
            "store_url": str(tmp_path / "store"),
            "cache_directory": tmp_path / "cache",
            "capacity_bytes": 1 << 20,
            "environment": fetcher_environment(os.environ, {}),
        }
        clients.append(FetcherClient(**{**parameters, **changes}))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(make_client: Callable[..., FetcherClient]) -> FetcherClient:
    client = make_client()
    client.start()
    return client


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def stored(client: FetcherClient, source: Path) -> FetcherClient:
    client.store.put_file(object_key(KEY), source, sha256=SHA256)
    return client


def fetch(client: FetcherClient, key: AdapterKey = KEY) -> FetchedBlock:
    return client.fetch(key, sha256=SHA256, size_bytes=len(CONTENT)).result(TIMEOUT)


def pid_of(client: FetcherClient) -> int:
    return wait_for(lambda: client.pid or 0, seconds=TIMEOUT)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_tells_where_it_found_a_block_and_how_long_it_took(stored: FetcherClient) -> None:
    first, second = fetch(stored), fetch(stored)
    assert (first.tier, second.tier) == (Tier.STORE, Tier.DISK)
    assert first.path == second.path
    assert first.path.read_bytes() == CONTENT
    assert first.seconds > 0


def test_errors_arrive_as_they_were_raised(stored: FetcherClient, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound):
        fetch(stored, AdapterKey("tenant", "sha256:" + "b" * 64))
    with pytest.raises(ObjectCorrupt, match="SHA-256"):
        stored.fetch(KEY, sha256="0" * 64, size_bytes=len(CONTENT)).result(TIMEOUT)
    with pytest.raises(AdapterUnavailable, match="disk failed"):
        stored.store.fetch_file(
            object_key(KEY), tmp_path / "missing" / "x", sha256=SHA256, size_bytes=len(CONTENT)
        )


def test_forgotten_block_is_gone_from_the_disk(stored: FetcherClient) -> None:
    path = fetch(stored).path
    stored.forget(KEY)
    assert not path.exists()
    assert fetch(stored).tier is Tier.STORE


def test_counts_what_the_disk_cache_did_over_all_lives(stored: FetcherClient) -> None:
    fetch(stored)
    fetch(stored)
    assert stored.stats().disk.num_misses == 1
    assert stored.stats().disk.num_hits == 1
    assert stored.stats().disk.used_bytes == len(CONTENT)
    os.kill(pid_of(stored), signal.SIGKILL)
    wait_for(lambda: stored.stats().num_restarts == 1 and stored.pid)
    fetch(stored)
    assert stored.stats().disk.num_hits == 2
    assert stored.stats().disk.used_bytes == len(CONTENT)


def test_a_killed_process_costs_calls_under_way_an_error_and_is_replaced(
    stored: FetcherClient,
) -> None:
    pid = pid_of(stored)
    os.kill(pid, signal.SIGSTOP)
    under_way = stored.fetch(KEY, sha256=SHA256, size_bytes=len(CONTENT))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(StoreUnavailable):
        under_way.result(TIMEOUT)
    wait_for(lambda: stored.pid not in (None, pid))
    assert fetch(stored).path.read_bytes() == CONTENT


@pytest.mark.slow
def test_a_process_that_gives_no_sign_of_life_is_replaced(
    make_client: Callable[..., FetcherClient], source: Path
) -> None:
    client = make_client(stall_seconds=10.0)
    client.start()
    client.store.put_file(object_key(KEY), source, sha256=SHA256)
    pid = pid_of(client)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(StoreUnavailable):
        fetch(client)
    wait_for(lambda: client.pid not in (None, pid), seconds=TIMEOUT)
    assert not is_alive(pid)
    assert fetch(client).path.read_bytes() == CONTENT


def test_calls_without_a_process_fail_at_once(make_client: Callable[..., FetcherClient]) -> None:
    client = make_client()
    with pytest.raises(StoreUnavailable):
        client.forget(KEY)
    client.start()
    client.close()
    with pytest.raises(StoreUnavailable):
        fetch(client)


def test_closing_ends_the_process(client: FetcherClient) -> None:
    pid = pid_of(client)
    client.close()
    assert not is_alive(pid)


def test_the_servers_death_ends_the_process(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys, time\n"
        "from loraplex.adapters.fetcher_client import FetcherClient\n"
        "here = pathlib.Path(sys.argv[1])\n"
        "client = FetcherClient(store_url=str(here / 'store'), cache_directory=here / 'cache',\n"
        "    capacity_bytes=1000, environment=dict(os.environ))\n"
        "client.start()\n"
        "print(client.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert is_alive(pid)
        server.kill()
        server.wait()
        wait_for(lambda: not is_alive(pid))


@pytest.mark.parametrize("url", ["http://host/bucket", "s3://bucket?secret=x"])
def test_a_malformed_store_is_the_operators_mistake(
    url: str, make_client: Callable[..., FetcherClient]
) -> None:
    with pytest.raises(ValueError, match="store"):
        make_client(store_url=url).start()


def test_an_unusable_folder_is_told_at_the_start(
    make_client: Callable[..., FetcherClient], source: Path
) -> None:
    with pytest.raises(StoreUnavailable, match="folder"):
        make_client(store_url=str(source / "store")).start()
    with pytest.raises(AdapterUnavailable, match="cache"):
        make_client(cache_directory=source / "cache").start()


class TestRemoteStore:
    def test_does_what_the_store_does(
        self, client: FetcherClient, source: Path, tmp_path: Path
    ) -> None:
        key = object_key(KEY)
        assert not client.store.exists(key)
        client.store.put_file(key, source, sha256=SHA256)
        assert client.store.exists(key)
        assert LocalStore(tmp_path / "store").exists(key)
        client.store.fetch_file(key, tmp_path / "copy", sha256=SHA256, size_bytes=len(CONTENT))
        assert (tmp_path / "copy").read_bytes() == CONTENT
        (listed,) = client.store.list_keys("t/")
        assert (listed.key, listed.size_bytes) == (key, len(CONTENT))
        client.store.delete(key)
        assert not client.store.exists(key)

    def test_reads_relative_paths_as_the_server_does(
        self, client: FetcherClient, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(source.parent)
        client.store.put_file(object_key(KEY), Path(source.name), sha256=SHA256)
        assert fetch(client).path.is_absolute()

    def test_lists_page_by_page_without_a_gap(
        self, client: FetcherClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("loraplex.adapters.fetcher_client.PAGE_OBJECTS", 3)
        names = [f"t/{name}" for name in ("a/1", "a/2", "a-b", "a.b/x", "b", "c", "d/e/f")]
        for name in names:
            path = tmp_path / "store" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")
        assert [found.key for found in client.store.list_keys("t/")] == sorted(names)

    def test_tells_how_far_an_upload_has_come(self, client: FetcherClient, tmp_path: Path) -> None:
        (tmp_path / "large").write_bytes(bytes(10 << 20))
        told: list[int] = []
        client.store.put_file(
            object_key(KEY), tmp_path / "large", sha256=SHA256, on_progress=told.append
        )
        assert told == sorted(told)
        assert told[-1] == 10 << 20
        assert len(told) >= 2

    @pytest.mark.parametrize("key", ["../x", "", "t//x"])
    def test_refuses_keys_that_are_not_plain_paths(
        self, key: str, client: FetcherClient, source: Path
    ) -> None:
        with pytest.raises(ValueError, match="not an object key"):
            client.store.put_file(key, source, sha256=SHA256)
        with pytest.raises(ValueError, match="not an object key"):
            client.store.delete(key)

    def test_what_a_killed_upload_left_is_removed_when_it_is_old_enough(
        self, client: FetcherClient, tmp_path: Path
    ) -> None:
        (tmp_path / "store" / ".incoming" / "left").write_bytes(b"half")
        assert client.store.remove_abandoned(older_than_seconds=3600) == 0
        assert client.store.remove_abandoned(older_than_seconds=-1) == 1


class TestEnvironment:
    def test_takes_the_credentials_out_of_the_process(self) -> None:
        script = (
            "import os\n"
            "from loraplex.adapters.fetcher_environment import take_credentials\n"
            "taken = take_credentials()\n"
            "assert taken == {'AWS_SECRET_ACCESS_KEY': 'marked-secret', 'AWS_PROFILE': 'mine'}\n"
            "assert not [name for name in os.environ if name.startswith('AWS_')]\n"
            "assert b'marked-secret' not in open('/proc/self/environ', 'rb').read()\n"
            "assert b'KEPT=kept' in open('/proc/self/environ', 'rb').read()\n"
        )
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "AWS_SECRET_ACCESS_KEY": "marked-secret",
            "AWS_PROFILE": "mine",
            "KEPT": "kept",
        }
        subprocess.run([sys.executable, "-c", script], env=environment, check=True)

    def test_passes_the_credentials_and_nothing_of_the_servers_own(self) -> None:
        ours = {"PATH": "/bin", "HOME": "/root", "LORAPLEX_SECRET": "x", "HF_TOKEN": "x"}
        passed = fetcher_environment(ours, {"AWS_PROFILE": "mine"})
        own = {"PYTHONPATH", *ZEROED_MEMORY}
        assert passed.keys() == {"PATH", "HOME", "AWS_PROFILE", *own}

    def test_takes_nothing_where_there_is_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        assert take_credentials() == {}


class TestMessages:
    def test_messages_are_found_however_the_bytes_arrive(self) -> None:
        messages: list[ToFetcher] = [
            Fetch(1, KEY, SHA256, 5),
            Delete(2, "t/x"),
            Delete(3, "t/" + "y" * 70_000),
        ]
        stream = b"".join(encode(message) for message in messages)
        for size in (1, 3, 4096, len(stream)):
            inbox = Inbox()
            pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
            found = [decode_to_fetcher(each) for piece in pieces for each in inbox.take(piece)]
            assert found == messages

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"null",
            b'{"type":"Unknown","call_id":1}',
            b'{"type":"Delete","call_id":1}',
            b'{"type":"Delete","call_id":"1","key":"x"}',
            b'{"type":"Delete","call_id":1,"key":"x","more":1}',
            b'{"type":"Done","call_id":1}',
        ],
    )
    def test_what_is_no_call_is_refused(self, content: bytes) -> None:
        with pytest.raises(MessageRefused):
            decode_to_fetcher(content)

    def test_a_call_is_no_answer(self) -> None:
        with pytest.raises(MessageRefused):
            decode_from_fetcher(encode(Delete(1, "t/x"))[4:])

    def test_a_message_beyond_the_limit_is_refused_before_it_is_stored(self) -> None:
        with pytest.raises(MessageRefused):
            list(Inbox().take((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big")))


def test_a_removal_does_not_wait_for_transfers() -> None:
    may_end, is_removed = threading.Event(), threading.Event()
    store = SimpleNamespace(
        put_file=lambda *_, **__: may_end.wait(TIMEOUT), delete=lambda key: is_removed.set()
    )
    service = FetcherService(
        cast(Any, SimpleNamespace(send=lambda message: None)),
        store=cast(Any, store),
        disk_cache=cast(Any, SimpleNamespace(stats=None)),
        transfer_seconds=TIMEOUT,
    )
    try:
        for call_id in range(NUM_STORE_THREADS):
            service._take(PutFile(call_id, object_key(KEY), "source", SHA256))
        service._take(Delete(NUM_STORE_THREADS, object_key(KEY)))
        assert is_removed.wait(TIMEOUT)
    finally:
        may_end.set()


def test_a_process_that_is_told_nonsense_ends(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "loraplex.adapters.fetcher_process"],
            stdin=theirs.fileno(),
            stderr=subprocess.DEVNULL,
            env=fetcher_environment(os.environ, {}),
        )
        theirs.close()
        ours.sendall(encode(Delete(1, "t/x")))
        assert process.wait(TIMEOUT) == 1
