"""Counts the results of loads from a store whose responses are damaged in every way."""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.fetcher_client import FetcherClient
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.store import object_key
from support.fault_proxy import READ_FAULTS, Fault, FaultProxy
from support.s3 import emulated_s3, fetcher_environment_for_tests, make_bucket

NUM_WORKERS = 32
"""Loads at a time; each has an object of its own, so that their plans do not mix."""
BUCKET = "adapters"
RESULT_SECONDS = 120.0
TRANSFER_SECONDS = 2.0
IMPATIENT = "connect_timeout=2&read_timeout=0.4&max_attempts=2"
PATIENT = "connect_timeout=10&read_timeout=30"
CODES = frozenset(
    {"store_unavailable", "store_denied", "object_corrupt", "object_not_found"},
)
"""With which a load from a faulty store may fail."""

# What costs the most time comes the least often.
_WEIGHTS = {Fault.TRICKLE: 1, Fault.HANG: 2, Fault.HANG_WITHIN: 2}


@dataclass
class FaultyLoads:
    """What came of them."""

    tried: int = 0
    """Loads that met at least one fault."""
    corrupt_served: int = 0
    """Loads that were answered with other bytes than were stored."""
    uncoded: int = 0
    """Loads that failed otherwise than by a published code."""
    succeeded: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """By code."""
    faults: Counter[str] = field(default_factory=Counter)
    objects: int = 0
    recovered: int = 0
    """Objects that loaded when the faults had ended."""
    corrupt_files: int = 0
    """Files in the disk cache, at the end, with other content than was stored."""


@dataclass(frozen=True)
class _Object:
    key: AdapterKey
    content: bytes

    @classmethod
    def make(cls, index: int, seed: int) -> _Object:
        content = random.Random(f"{seed}/{index}").randbytes(500 + 3000 * index)
        return cls(AdapterKey(f"tenant-{index % 5}", f"sha256:{index:064x}"), content)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def url_path(self) -> str:
        return f"/{BUCKET}/p/{object_key(self.key)}"


def run_faulty_loads(num_loads: int, seed: int) -> FaultyLoads:
    """Load again and again through a proxy that harms the first answers of every load.

    Fails if the store does not serve every object once the faults have ended.
    """
    objects = [_Object.make(index, seed) for index in range(NUM_WORKERS)]
    counts = FaultyLoads(objects=len(objects))
    with (
        tempfile.TemporaryDirectory() as directory,
        emulated_s3() as server,
        FaultProxy(server) as proxy,
    ):
        bucket = make_bucket(server, BUCKET)
        for stored in objects:
            bucket.put_object(Key=f"p/{object_key(stored.key)}", Body=stored.content)
        cache = Path(directory) / "cache"
        with closing(_client(proxy.url, cache, IMPATIENT)) as client:
            client.start()
            with ThreadPoolExecutor(NUM_WORKERS) as workers:
                shares = [range(index, num_loads, NUM_WORKERS) for index in range(len(objects))]
                outcomes = workers.map(
                    lambda stored, share: _load_often(client, proxy, stored, share, seed),
                    objects,
                    shares,
                )
                for outcome in outcomes:
                    _add(counts, outcome)
        counts.faults = Counter({str(fault): n for fault, n in proxy.num_faults.items()})
        counts.corrupt_files = _num_corrupt_files(cache, objects)
        proxy.clear()
        with closing(_client(proxy.url, cache, PATIENT, transfer_seconds=90.0)) as client:
            client.start()
            counts.recovered = sum(_serves(client, stored) for stored in objects)
    return counts


def _client(
    endpoint: str, cache: Path, options: str, transfer_seconds: float = TRANSFER_SECONDS
) -> FetcherClient:
    return FetcherClient(
        store_url=f"s3://{BUCKET}/p?endpoint={endpoint}&addressing_style=path&{options}",
        cache_directory=cache,
        capacity_bytes=1 << 30,
        environment=fetcher_environment_for_tests(),
        transfer_seconds=transfer_seconds,
    )


def _load_often(
    client: FetcherClient, proxy: FaultProxy, stored: _Object, numbers: range, seed: int
) -> FaultyLoads:
    counts = FaultyLoads()
    for number in numbers:
        proxy.plan(stored.url_path, draw_faults(random.Random(f"{seed}:{number}")))
        client.forget(stored.key)
        counts.tried += 1
        fetch = client.fetch(stored.key, sha256=stored.sha256, size_bytes=len(stored.content))
        try:
            served = fetch.result(RESULT_SECONDS).path.read_bytes()
        except AdapterError as exc:
            counts.failed[exc.code] += 1
            counts.uncoded += exc.code not in CODES
        except Exception as exc:
            counts.failed[type(exc).__name__] += 1
            counts.uncoded += 1
        else:
            counts.succeeded += 1
            counts.corrupt_served += served != stored.content
    return counts


def draw_faults(draw: random.Random) -> Sequence[Fault]:
    """What one load meets: one to four faults, then none."""
    weights = [_WEIGHTS.get(fault, 4) for fault in READ_FAULTS]
    return draw.choices(READ_FAULTS, weights, k=draw.choice([1, 1, 2, 4]))


def _add(total: FaultyLoads, share: FaultyLoads) -> None:
    total.tried += share.tried
    total.corrupt_served += share.corrupt_served
    total.uncoded += share.uncoded
    total.succeeded += share.succeeded
    total.failed += share.failed


def _num_corrupt_files(cache: Path, objects: Sequence[_Object]) -> int:
    stored = {each.sha256 for each in objects}
    found = [hashlib.sha256(file.read_bytes()).hexdigest() for file in cache.glob("*.block")]
    return sum(digest not in stored for digest in found)


def _serves(client: FetcherClient, stored: _Object) -> bool:
    client.forget(stored.key)
    fetch = client.fetch(stored.key, sha256=stored.sha256, size_bytes=len(stored.content))
    return fetch.result(RESULT_SECONDS).path.read_bytes() == stored.content
