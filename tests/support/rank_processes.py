"""An engine of several rank processes, behind its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.config import EngineConfig
from loraplex.engine.messages import GenerationRequest, RequestFinished, TokensGenerated
from loraplex.engine.process.adapter_fetches import FetchedBlock
from loraplex.engine.process.client import EngineClient
from loraplex.engine.process.supervisor import RestartPolicy
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.shards.rank_place import GroupShape
from support.engine import MIB

PROMPT = [72, 101, 108, 108, 111]
STALL_SECONDS = 3.0
MAX_WAIT_SECONDS = 600.0
"""On a busy machine a group of several processes takes minutes to start."""


def make_config(model: Path, shape: GroupShape = GroupShape(2, 1), **settings: Any) -> EngineConfig:
    """`settings`: further fields."""
    return EngineConfig(
        str(model),
        device="cpu",
        num_threads=1,
        tensor_parallel_size=shape.ranks_per_stage,
        pipeline_parallel_size=shape.num_stages,
        kv_cache_bytes=4 * MIB,
        arena_bytes=4 * MIB,
        host_cache_bytes=8 * MIB,
        **settings,
    )


def make_request(
    request_id: str, max_tokens: int, prompt: Sequence[int] = PROMPT
) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(request_id, "acme", list(prompt), sampling)


async def no_adapter(key: AdapterKey) -> FetchedBlock:
    raise AssertionError(key)


async def generate(client: EngineClient, request_id: str) -> list[int]:
    events = [event async for event in client.generate(make_request(request_id, 16))]
    assert isinstance(events[-1], RequestFinished)
    assert events[-1].error is None
    return [t for event in events if isinstance(event, TokensGenerated) for t in event.token_ids]


@asynccontextmanager
async def serving(
    model: Path,
    shape: GroupShape = GroupShape(2, 1),
    stall_seconds: float = STALL_SECONDS,
    **settings: Any,
) -> AsyncIterator[EngineClient]:
    """A started client. It gives the engine up after `stall_seconds` without progress. `settings`:
    see `make_config`."""
    client = EngineClient(
        make_config(model, shape, **settings),
        on_adapter_wanted=no_adapter,
        restarts=RestartPolicy(stall_seconds=stall_seconds, max_deaths=1000, max_delay_seconds=1.0),
    )
    try:
        await client.start()
        yield client
    finally:
        await client.stop()


def follower_pids(client: EngineClient) -> list[int]:
    """The processes that rank 0 has started."""
    assert client.pid is not None
    children = Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, command in commands.items() if b"loraplex.engine.ranks.main" in command]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.05)
