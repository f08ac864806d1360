"""A client of the fake engine, and helpers for a request's events."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Tier
from loraplex.engine.config import EngineConfig
from loraplex.engine.messages import (
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    RequestFinished,
    RequestStarted,
    SpeculationParams,
    TokensGenerated,
)
from loraplex.engine.process.adapter_fetches import FetchedBlock
from loraplex.engine.process.client import EngineClient
from loraplex.engine.process.engine import Engine
from loraplex.engine.process.request_stream import RequestEvent, RequestStream
from loraplex.engine.process.supervisor import RestartPolicy
from loraplex.engine.sampling_params import SamplingParams

TIMEOUT_SECONDS = 60
FAKE_ENGINE = (sys.executable, "-P", "-m", "support.fake_engine")


class Block(NamedTuple):
    path: Path
    tier: Tier


async def fetch_at_once(key: AdapterKey) -> FetchedBlock:
    return Block(Path("/blocks") / key.digest, Tier.DISK)


@asynccontextmanager
async def running(
    home: Path,
    *,
    on_adapter_wanted: Callable[[AdapterKey], Awaitable[FetchedBlock]] = fetch_at_once,
    max_deaths: int = 5,
    stall_seconds: float = RestartPolicy().stall_seconds,
    max_queued: int = 4096,
) -> AsyncIterator[EngineClient]:
    client = EngineClient(
        EngineConfig(model=str(home), max_queued=max_queued, max_num_seqs=1),
        on_adapter_wanted=on_adapter_wanted,
        command=FAKE_ENGINE,
        restarts=RestartPolicy(
            first_delay_seconds=0.01, max_deaths=max_deaths, stall_seconds=stall_seconds
        ),
    )
    async with asyncio.timeout(TIMEOUT_SECONDS):
        try:
            await client.start()
            yield client
        finally:
            await client.stop()


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    max_tokens: int = 4,
    adapter: str | None = None,
    deadline_seconds: float | None = None,
    num_draft_tokens: int = 0,
) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    key = None if adapter is None else AdapterKey("acme", adapter)
    return GenerationRequest(
        request_id,
        "acme",
        prompt,
        sampling,
        key,
        speculation=SpeculationParams(num_tokens=num_draft_tokens),
        deadline_seconds=deadline_seconds,
    )


async def collect(stream: AsyncIterator[RequestEvent]) -> list[RequestEvent]:
    return [event async for event in stream]


def tokens_of(events: list[RequestEvent]) -> list[int]:
    return [t for event in events if isinstance(event, TokensGenerated) for t in event.token_ids]


def end_of(events: list[RequestEvent]) -> RequestFinished:
    """The last event, which must be the only one of its kind."""
    assert [isinstance(event, RequestFinished) for event in events].count(True) == 1
    assert isinstance(events[-1], RequestFinished)
    return events[-1]


def error_of(events: list[RequestEvent]) -> ErrorInfo:
    finished = end_of(events)
    assert finished.reason is FinishReason.ERROR
    assert finished.error is not None
    return finished.error


async def submit_started(client: Engine, request: GenerationRequest) -> RequestStream:
    """Submit, and read up to the first token."""
    stream = client.submit(request)
    assert isinstance(await anext(stream), RequestStarted)
    assert isinstance(await anext(stream), TokensGenerated)
    return stream


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def kill(client: EngineClient) -> None:
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
