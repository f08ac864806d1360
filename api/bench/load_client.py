"""Load client: sends a workload at a fixed concurrency and records when tokens arrive.

It inspects only the first bytes of each line and parses only the last line. So a token takes about
150 µs of one core, which hardly slows down a server on the same machine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from time import perf_counter

import httpx

from .summary import RequestTiming, Run
from .workload import LoadRequest, Workload, load_requests

READ_TIMEOUT_SECONDS = 300.0
_DATA, _DONE = b"data: ", b"data: [DONE]"
_NO_TEXT, _NO_CHOICE = b'"text":""', b'"choices":[]'


class RequestFailed(Exception):
    """The server answered a benchmark request with an error, or not in full."""


async def run_workload(
    workload: Workload,
    *,
    base_url: str,
    api_key: str,
    on_finished: Callable[[], None] = lambda: None,
    read_timeout_seconds: float = READ_TIMEOUT_SECONDS,
) -> Run:
    """Run it once; `base_url` ends in `/v1`. Raises `RequestFailed` for the first that fails."""
    waiting = iter(load_requests(workload))
    limits = httpx.Limits(max_connections=workload.concurrency)
    headers = {"Authorization": f"Bearer {api_key}"}
    timeout = httpx.Timeout(read_timeout_seconds)
    async with httpx.AsyncClient(
        base_url=base_url, headers=headers, limits=limits, timeout=timeout
    ) as client:
        started = perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                workers = [
                    group.create_task(_work(client, waiting, on_finished))
                    for _ in range(workload.concurrency)
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        wall_seconds = perf_counter() - started
    timings = tuple(timing for worker in workers for timing in worker.result())
    return Run(timings=timings, wall_seconds=wall_seconds)


async def _work(
    client: httpx.AsyncClient, waiting: Iterator[LoadRequest], on_finished: Callable[[], None]
) -> list[RequestTiming]:
    """Send requests from the shared iterator until it is exhausted."""
    timings: list[RequestTiming] = []
    for request in waiting:
        timings.append(await _send(client, request))
        on_finished()
    return timings


async def _send(client: httpx.AsyncClient, request: LoadRequest) -> RequestTiming:
    sent = perf_counter()
    try:
        async with client.stream("POST", "/completions", json=_body(request)) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                raise RequestFailed(f"{request.model}: HTTP {response.status_code}: {text}")
            return await _read_events(response, request, sent)
    except httpx.TransportError as exc:
        raise RequestFailed(f"{request.model}: {exc or type(exc).__name__}") from exc


async def _read_events(
    response: httpx.Response, request: LoadRequest, sent: float
) -> RequestTiming:
    arrivals: list[float] = []
    last = b""
    rest = b""
    async for received in response.aiter_raw():
        now = perf_counter()
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            if not line.startswith(_DATA) or line.startswith(_DONE):
                continue
            last = line
            if _NO_TEXT not in line and _NO_CHOICE not in line:
                arrivals.append(now)
    output_tokens = _completion_tokens(last)
    if output_tokens != request.output_tokens:
        raise RequestFailed(
            f"{request.model}: {output_tokens} of {request.output_tokens} tokens; the stream "
            f"ended with {last.decode(errors='replace')!r}"
        )
    return RequestTiming(sent=sent, chunks=tuple(arrivals), output_tokens=output_tokens)


def _body(request: LoadRequest) -> dict[str, object]:
    return {
        "model": request.model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _completion_tokens(event: bytes) -> int | None:
    """The count in the stream's last event; None if it is not a usage event."""
    if not event:
        return None
    usage = json.loads(event.removeprefix(_DATA)).get("usage")
    return usage["completion_tokens"] if usage else None
