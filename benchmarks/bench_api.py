"""API overhead without the engine: CPU time per request and per token, and memory.

`make bench-api`. The server is a separate process, its engine another one that only repeats
prompts, its database SQLite in the temporary folder. It measures the CPU time of all threads of the
server's process, as reported by the system: for a request that is not streamed, without limits,
with limits, and for an adapter by its alias; for a streamed token, as the slope between short and
long streams; and the memory of the process with 1,000 concurrent streams, twice. Tokens that wait
for a slow reader are sent together, which is cheaper: the number of tokens per event is printed
next to the cost per token, and is 1 if all readers keep up.

Prints the figures, and finally one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import httpx

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.store import object_key
from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters.service import NewVersion
from loraplex.platform.adapters.states import VersionState
from loraplex.platform.quotas import service as quotas
from loraplex.platform.quotas.service import Limits
from loraplex.platform.sessions import TenantSession
from support.catalog import bring_to
from support.fake_engine import PACE_FILE, fake_info
from support.models import make_tiny_llama
from support.mortal_server import MortalServer, mortal_server
from support.server import Caller

MAX_REQUEST_SECONDS = 2e-3
MAX_TOKEN_SECONDS = 20e-6
"""The bars, in CPU time."""
NUM_WORKERS = 16
NUM_STREAMS = 1000
SHORT, LONG = 1, 401
"""Tokens of a stream."""
MANY = 10**9
ALL_LIMITS = Limits(
    requests_per_minute=MANY,
    input_tokens_per_minute=MANY,
    output_tokens_per_minute=MANY,
    concurrent_requests=MANY,
    tokens_per_period=10**15,
)
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Figures:
    """CPU time in seconds, memory in bytes."""

    request_seconds: float
    limited_request_seconds: float
    adapter_request_seconds: float
    """Without limits."""
    token_seconds: float
    tokens_per_event: float
    """Of the streams that `token_seconds` is from."""
    idle_bytes: int
    streams_bytes: int
    """With all streams open, the first time."""
    again_bytes: int
    """The second time."""

    @property
    def is_within_bars(self) -> bool:
        requests = self.request_seconds, self.adapter_request_seconds
        return max(requests) <= MAX_REQUEST_SECONDS and self.token_seconds <= MAX_TOKEN_SECONDS


class Load:
    """Callers of one server."""

    def __init__(self, server: MortalServer, caller: Caller, model: str) -> None:
        self._server = server
        self._caller = caller
        self._model = model
        self.num_events = 0
        """Of all streams that were read."""

    async def ask(
        self, num_requests: int, *, num_at_once: int, num_tokens: int, is_stream: bool
    ) -> None:
        """Ask so often, and read every answer to its end."""
        numbers = iter(range(num_requests))
        headers = {"authorization": f"Bearer {self._caller.key}"}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._server.url, headers=headers, timeout=300.0, limits=limits
        ) as client:
            body = {
                "model": self._model,
                "prompt": "abcdefghijklmnopqrstuvwxyz",
                "max_tokens": num_tokens,
                "stream": is_stream,
            }
            if is_stream:
                body["stream_options"] = {"include_usage": True}

            async def work() -> None:
                for _ in numbers:
                    async with client.stream("POST", "/v1/completions", json=body) as answer:
                        text = b"".join([part async for part in answer.aiter_raw()])
                        assert answer.is_success, text
                        assert b'"completion_tokens":%d,' % num_tokens in text
                        self.num_events += text.count(b"data: ")

            await asyncio.gather(*(work() for _ in range(num_at_once)))

    def cpu_seconds(self, num_requests: int, *, num_tokens: int, is_stream: bool) -> float:
        """What the server took for so many requests."""
        before = cpu_seconds(self._server.pid)
        work = self.ask(
            num_requests, num_at_once=NUM_WORKERS, num_tokens=num_tokens, is_stream=is_stream
        )
        asyncio.run(work)
        return cpu_seconds(self._server.pid) - before


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of the process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(server: MortalServer, model: str, num_requests: int, num_streams: int) -> Figures:
    numbers = count()

    def load(
        prepare: Callable[[TenantSession], object] = lambda session: None, asked: str = model
    ) -> Load:
        caller = server.as_server().make_caller(f"tenant-{next(numbers)}")
        database = server.as_server().database
        with database.transaction(caller.tenant_id) as session:
            prepare(session)
        database.close()
        return Load(server, caller, asked)

    def publish(session: TenantSession) -> None:
        """A version with an alias, whose block the engine takes unread."""
        block, digest = b"a block", f"sha256:{hashlib.sha256(b'weights').hexdigest()}"
        path = Path(server.settings.data_dir, "store")
        path /= object_key(AdapterKey(session.tenant_id, digest))
        path.parent.mkdir(parents=True)
        path.write_bytes(block)
        new = NewVersion(
            adapter_name="bot",
            digest=digest,
            base_id=fake_info("base").base_id,
            object_sha256=hashlib.sha256(block).hexdigest(),
            size_bytes=len(block),
            intake_report={},
        )
        bring_to(session, catalog.create_version(session, new).version, VersionState.READY)
        catalog.set_alias(session, "bot", "live", 1)

    free, adapted = load(), load(publish, "bot@live")
    limited = load(lambda session: quotas.set_limits(session, ALL_LIMITS))

    def per_request(who: Load) -> float:
        return who.cpu_seconds(num_requests, num_tokens=16, is_stream=False) / num_requests

    def per_token() -> tuple[float, float]:
        num = max(num_requests // 10, NUM_WORKERS)
        before = free.num_events
        short = free.cpu_seconds(num, num_tokens=SHORT, is_stream=True)
        between = free.num_events
        long = free.cpu_seconds(num, num_tokens=LONG, is_stream=True)
        num_tokens = num * (LONG - SHORT)
        num_events = free.num_events - between - (between - before)
        return (long - short) / num_tokens, num_tokens / num_events

    per_request(free)  # warm
    free_seconds, limited_seconds = per_request(free), per_request(limited)
    per_request(adapted)  # loads it
    adapted_seconds = per_request(adapted)
    token_seconds, tokens_per_event = per_token()
    idle = resident_bytes(server.pid)
    most = [most_bytes(server.pid, lambda: asyncio.run(streams(free, num_streams))) for _ in "12"]
    return Figures(
        request_seconds=free_seconds,
        limited_request_seconds=limited_seconds,
        adapter_request_seconds=adapted_seconds,
        token_seconds=token_seconds,
        tokens_per_event=tokens_per_event,
        idle_bytes=idle,
        streams_bytes=most[0],
        again_bytes=most[1],
    )


async def streams(load: Load, num_streams: int) -> None:
    """So many streams at once."""
    await load.ask(num_streams, num_at_once=num_streams, num_tokens=LONG, is_stream=True)


def most_bytes(pid: int, work: Callable[[], None]) -> int:
    """The most memory that the process held while the work was done."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the high-water mark starts again
    work()
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=NUM_STREAMS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as home:
        base = make_tiny_llama(Path(home) / "base")
        (base / PACE_FILE).write_text("0.002")
        with mortal_server(base, Path(home) / "data") as server:
            server.start()
            begun_at = time.monotonic()
            figures = measure(server, base.name, options.requests, options.streams)
            seconds = time.monotonic() - begun_at
            server.stop()
    print(f"CPU time of the API, {seconds:.0f} s of measuring")
    for what, figure, unit in (
        ("a request, not streamed, no limits", figures.request_seconds * 1e3, "ms"),
        ("the same with all limits", figures.limited_request_seconds * 1e3, "ms"),
        ("under an adapter, by its alias", figures.adapter_request_seconds * 1e3, "ms"),
        ("a token of a stream", figures.token_seconds * 1e6, "us"),
        ("tokens in an event", figures.tokens_per_event, ""),
        ("memory, idle", figures.idle_bytes / 2**20, "MiB"),
        (f"memory, {options.streams} streams at once", figures.streams_bytes / 2**20, "MiB"),
        ("memory, the same again", figures.again_bytes / 2**20, "MiB"),
    ):
        print(f"  {what:36} {figure:8.2f} {unit}")
    print(json.dumps({**asdict(figures), "is_within_bars": figures.is_within_bars}))


if __name__ == "__main__":
    main()
