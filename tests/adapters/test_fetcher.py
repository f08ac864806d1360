from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path

import pytest

from loraplex.adapters.disk_cache import DiskCache
from loraplex.adapters.errors import (
    AdapterUnavailable,
    ObjectCorrupt,
    ObjectNotFound,
    StoreUnavailable,
)
from loraplex.adapters.fetcher import FetchedBlock, Fetcher
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Tier
from loraplex.adapters.store import object_key
from loraplex.adapters.store.local import LocalStore

TIMEOUT = 30.0


def make_key(index: int) -> AdapterKey:
    return AdapterKey("tenant", f"sha256:{index:064x}")


def content(index: int) -> bytes:
    return bytes([index]) * 1000


class ScriptedStore(LocalStore):
    """A local store that can be held, and that fails as often as it is told."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.fetched: list[str] = []
        self.failures: list[Exception] = []
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.arrived = threading.Semaphore(0)

    def fetch_file(
        self, key: str, path: Path, *, sha256: str, size_bytes: int, deadline: float | None = None
    ) -> None:
        self.fetched.append(key)
        path.touch()
        self.arrived.release()
        assert self.open_gate.wait(TIMEOUT)
        if self.failures:
            raise self.failures.pop(0)
        super().fetch_file(key, path, sha256=sha256, size_bytes=size_bytes, deadline=deadline)

    def put(self, index: int, data: bytes | None = None) -> None:
        path = self._directory / "source"
        path.write_bytes(content(index) if data is None else data)
        self.put_file(object_key(make_key(index)), path, sha256="")


@pytest.fixture
def store(tmp_path: Path) -> ScriptedStore:
    store = ScriptedStore(tmp_path / "store")
    for index in range(4):
        store.put(index)
    return store


@pytest.fixture
def fetcher(store: ScriptedStore, tmp_path: Path) -> Iterator[Fetcher]:
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    fetcher = Fetcher(store, cache, max_workers=8, max_of_tenant=4)
    yield fetcher
    store.open_gate.set()
    fetcher.close()


def fetch(fetcher: Fetcher, index: int) -> FetchedBlock:
    return submit(fetcher, index).result(TIMEOUT)


def submit(fetcher: Fetcher, index: int) -> Future[FetchedBlock]:
    sha256 = hashlib.sha256(content(index)).hexdigest()
    return fetcher.fetch(make_key(index), sha256=sha256, size_bytes=1000)


def cached_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache").iterdir())


def test_tells_where_it_found_the_block(fetcher: Fetcher, store: ScriptedStore) -> None:
    first, second = fetch(fetcher, 1), fetch(fetcher, 1)
    assert (first.tier, second.tier) == (Tier.STORE, Tier.DISK)
    assert first.path == second.path
    assert first.path.read_bytes() == content(1)
    assert len(store.fetched) == 1


def test_fifty_at_once_share_one_download(fetcher: Fetcher, store: ScriptedStore) -> None:
    store.open_gate.clear()
    futures = [submit(fetcher, 1) for _ in range(50)]
    store.open_gate.set()
    assert {future.result(TIMEOUT).path.read_bytes() for future in futures} == {content(1)}
    assert len(store.fetched) == 1


def test_different_adapters_are_fetched_in_parallel(fetcher: Fetcher, store: ScriptedStore) -> None:
    store.open_gate.clear()
    futures = [submit(fetcher, index) for index in range(4)]
    for _ in futures:
        assert store.arrived.acquire(timeout=TIMEOUT)
    store.open_gate.set()
    assert [future.result(TIMEOUT).path.read_bytes() for future in futures] == [
        content(index) for index in range(4)
    ]


def test_a_fetch_waits_for_none_of_the_800_of_another_tenant(
    fetcher: Fetcher, store: ScriptedStore
) -> None:
    store.open_gate.clear()
    flood = [
        fetcher.fetch(AdapterKey("loud", f"sha256:{index:064x}"), sha256="", size_bytes=1000)
        for index in range(800)
    ]
    for _ in range(4):
        assert store.arrived.acquire(timeout=TIMEOUT)
    submit(fetcher, 0)
    assert store.arrived.acquire(timeout=TIMEOUT)
    assert store.fetched[-1] == object_key(make_key(0))
    assert len(store.fetched) == 5, "half of the threads were left to the others"
    store.open_gate.set()
    for waiting in flood:
        with pytest.raises(ObjectNotFound):
            waiting.result(TIMEOUT)


def test_one_waiter_that_gives_up_does_not_disturb_the_others(
    fetcher: Fetcher, store: ScriptedStore
) -> None:
    store.open_gate.clear()
    impatient, patient = submit(fetcher, 1), submit(fetcher, 1)
    assert impatient.cancel()
    store.open_gate.set()
    assert patient.result(TIMEOUT).tier is Tier.STORE
    with pytest.raises(CancelledError):
        impatient.result(TIMEOUT)


@pytest.mark.parametrize("failure", [ObjectCorrupt(), StoreUnavailable()])
def test_damaged_transfer_is_tried_once_more(
    failure: Exception, fetcher: Fetcher, store: ScriptedStore
) -> None:
    store.failures = [failure]
    assert fetch(fetcher, 1).path.read_bytes() == content(1)
    assert len(store.fetched) == 2


@pytest.mark.parametrize("data", [content(1)[:-1], content(1)[:-1] + b"\0", content(2), b""])
def test_damaged_object_is_never_served(
    data: bytes, fetcher: Fetcher, store: ScriptedStore, tmp_path: Path
) -> None:
    store.put(1, data)
    with pytest.raises(ObjectCorrupt):
        fetch(fetcher, 1)
    assert len(store.fetched) == 2
    assert cached_files(tmp_path) == []


def test_failure_is_not_remembered(fetcher: Fetcher, store: ScriptedStore) -> None:
    store.delete(object_key(make_key(1)))
    with pytest.raises(ObjectNotFound):
        fetch(fetcher, 1)
    store.put(1)
    assert fetch(fetcher, 1).tier is Tier.STORE


def test_blocks_on_the_disk_are_served_while_the_store_is_down(
    fetcher: Fetcher, store: ScriptedStore
) -> None:
    fetch(fetcher, 1)
    store.failures = [StoreUnavailable()] * 4
    assert fetch(fetcher, 1).tier is Tier.DISK
    with pytest.raises(StoreUnavailable):
        fetch(fetcher, 2)


def test_no_second_attempt_past_the_deadline(store: ScriptedStore, tmp_path: Path) -> None:
    fetcher = Fetcher(store, DiskCache(tmp_path / "cache", 1 << 20), deadline_seconds=-1.0)
    store.failures = [StoreUnavailable(), StoreUnavailable()]
    with pytest.raises(StoreUnavailable):
        fetch(fetcher, 1)
    assert len(store.fetched) == 1
    fetcher.close()


def test_full_disk_is_the_adapters_error(fetcher: Fetcher, store: ScriptedStore) -> None:
    store.failures = [OSError(28, "No space left on device")]
    with pytest.raises(AdapterUnavailable, match="No space left"):
        fetch(fetcher, 1)
    assert fetch(fetcher, 1).tier is Tier.STORE


def test_forgotten_adapter_is_fetched_anew(
    fetcher: Fetcher, store: ScriptedStore, tmp_path: Path
) -> None:
    fetch(fetcher, 1)
    fetcher.forget(make_key(1))
    assert cached_files(tmp_path) == []
    assert fetch(fetcher, 1).tier is Tier.STORE


def test_adapter_forgotten_while_it_is_fetched_leaves_nothing(
    fetcher: Fetcher, store: ScriptedStore, tmp_path: Path
) -> None:
    store.open_gate.clear()
    future = submit(fetcher, 1)
    assert store.arrived.acquire(timeout=TIMEOUT)
    fetcher.forget(make_key(1))
    assert cached_files(tmp_path) == [], "what had arrived of it is gone at once"
    store.open_gate.set()
    with pytest.raises(ObjectNotFound, match="deleted"):
        future.result(TIMEOUT)
    assert cached_files(tmp_path) == []
    assert fetch(fetcher, 1).tier is Tier.STORE


def test_adapter_forgotten_before_its_turn_leaves_nothing(
    store: ScriptedStore, tmp_path: Path
) -> None:
    fetcher = Fetcher(store, DiskCache(tmp_path / "cache", 1 << 20), max_workers=1)
    store.open_gate.clear()
    running, waiting = submit(fetcher, 1), submit(fetcher, 2)
    assert store.arrived.acquire(timeout=TIMEOUT)
    fetcher.forget(make_key(2))
    store.open_gate.set()
    with pytest.raises(ObjectNotFound, match="deleted"):
        waiting.result(TIMEOUT)
    assert cached_files(tmp_path) == [running.result(TIMEOUT).path]
    fetcher.close()


def test_closing_answers_everyone(store: ScriptedStore, tmp_path: Path) -> None:
    fetcher = Fetcher(store, DiskCache(tmp_path / "cache", 1 << 20), max_workers=1)
    store.open_gate.clear()
    running, waiting = submit(fetcher, 1), submit(fetcher, 2)
    assert store.arrived.acquire(timeout=TIMEOUT)
    closing = threading.Thread(target=fetcher.close)
    closing.start()
    with pytest.raises(StoreUnavailable, match="closing"):
        waiting.result(TIMEOUT)
    store.open_gate.set()
    assert running.result(TIMEOUT).tier is Tier.STORE
    closing.join(TIMEOUT)
    assert not closing.is_alive()
