"""The real engine in its own process."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Tier
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.messages import (
    GenerationRequest,
    RequestFinished,
    RequestStarted,
    TokensGenerated,
)
from loraplex.engine.process.adapter_fetches import FetchedBlock
from loraplex.engine.process.client import EngineClient
from loraplex.engine.sampling_params import SamplingParams
from support.engine import MIB, LocalEngine
from support.models import make_adapter

pytestmark = pytest.mark.slow

PROMPT = [72, 101, 108, 108, 111]


class Block(NamedTuple):
    path: Path
    tier: Tier


def make_request(
    request_id: str, adapter: AdapterKey | None = None, max_tokens: int = 16
) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=max_tokens > 16)
    return GenerationRequest(request_id, "acme", PROMPT, sampling, adapter)


def is_resident(client: EngineClient, adapter: AdapterKey) -> bool:
    entries = client.stats.adapters if client.stats else ()
    return any((entry.key, entry.tier) == (adapter, Tier.DEVICE) for entry in entries)


async def generate(
    client: EngineClient, request_id: str, adapter: AdapterKey | None = None
) -> list[int]:
    events = [event async for event in client.generate(make_request(request_id, adapter))]
    assert isinstance(events[-1], RequestFinished)
    assert events[-1].error is None
    return [t for event in events if isinstance(event, TokensGenerated) for t in event.token_ids]


def test_serves_loads_adapters_and_comes_back_after_kill(tiny_base: Path, tmp_path: Path) -> None:
    local = LocalEngine(tiny_base, tmp_path)
    adapter = local.add_adapter(make_adapter(tiny_base, tmp_path / "adapter", seed=1))
    expected = [local.generate(PROMPT), local.generate(PROMPT, adapter)]
    assert expected[0] != expected[1]
    fetched: list[AdapterKey] = []

    async def fetch(key: AdapterKey) -> FetchedBlock:
        fetched.append(key)
        return Block(local.paths[key], Tier.DISK)

    async def both(client: EngineClient) -> list[list[int]]:
        return list(await asyncio.gather(generate(client, "a"), generate(client, "b", adapter)))

    async def scenario() -> None:
        config = EngineConfig(
            str(tiny_base),
            device="cpu",
            num_threads=1,
            kv_cache_bytes=4 * MIB,
            arena_bytes=4 * MIB,
            host_cache_bytes=8 * MIB,
        )
        client = EngineClient(config, on_adapter_wanted=fetch)
        try:
            await client.start()
            assert client.info.runtime_id == local.core.info.runtime_id
            assert client.info.layout == local.core.info.layout
            assert await both(client) == expected
            await client.evict_adapter(adapter)
            assert await both(client) == expected
            assert fetched == [adapter] * 2, "an evicted adapter is fetched anew"

            while not is_resident(client, adapter):
                await asyncio.sleep(0.05)
            stream = client.submit(make_request("long", adapter, max_tokens=400))
            await anext(stream)
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            finished = [event async for event in stream][-1]
            assert isinstance(finished, RequestFinished)
            assert finished.error is not None
            assert finished.error.code == "engine_restarted"
            while not client.is_ready:
                await asyncio.sleep(0.05)
            while not is_resident(client, adapter):
                await asyncio.sleep(0.05)
            assert fetched == [adapter] * 3, "what was resident comes back unasked"
            assert await both(client) == expected
            assert len(fetched) == 3
        finally:
            await client.stop()

    asyncio.run(scenario())
    local.close()


def test_a_model_that_cannot_be_served_is_a_coded_failure(tiny_base: Path, tmp_path: Path) -> None:
    async def unused(key: AdapterKey) -> FetchedBlock:
        raise AssertionError(key)

    async def scenario() -> None:
        folder = shutil.copytree(tiny_base, tmp_path / "base")
        (folder / "config.json").write_text('{"model_type": "mystery"}')
        client = EngineClient(EngineConfig(str(folder)), on_adapter_wanted=unused)
        with pytest.raises(UnsupportedModel, match="mystery"):
            await client.start()
        assert client.failure is not None
        assert client.failure.code == "unsupported_model"
        await client.stop()

    asyncio.run(scenario())


def test_a_killed_engine_finds_its_prefixes_on_disk_but_not_those_deleted_meanwhile(
    tiny_base: Path, tmp_path: Path
) -> None:
    local = LocalEngine(tiny_base, tmp_path)
    adapter = local.add_adapter(make_adapter(tiny_base, tmp_path / "adapter", seed=1))
    prompt = [3 * index % 251 for index in range(69)]
    expected = [local.generate(prompt), local.generate(prompt, adapter)]

    async def fetch(key: AdapterKey) -> FetchedBlock:
        return Block(local.paths[key], Tier.DISK)

    async def ask(client: EngineClient, name: str, key: AdapterKey | None) -> tuple[list[int], int]:
        sampling = SamplingParams(max_tokens=len(expected[0]), temperature=0.0)
        request = GenerationRequest(name, "acme", prompt, sampling, key)
        events = [event async for event in client.generate(request)]
        (started,) = (event for event in events if isinstance(event, RequestStarted))
        tokens = [
            t for event in events if isinstance(event, TokensGenerated) for t in event.token_ids
        ]
        return tokens, started.num_cached_tokens

    async def scenario() -> None:
        config = EngineConfig(
            str(tiny_base),
            device="cpu",
            num_threads=1,
            kv_cache_bytes=4 * MIB,
            swap_bytes=MIB,
            prefix_disk_bytes=4 * MIB,
            prefix_disk_dir=str(tmp_path / "prefixes"),
            arena_bytes=4 * MIB,
            host_cache_bytes=8 * MIB,
        )
        client = EngineClient(config, on_adapter_wanted=fetch)
        try:
            await client.start()
            for name, key, tokens in (("a", None, expected[0]), ("b", adapter, expected[1])):
                assert await ask(client, name, key) == (tokens, 0)
            while client.stats is None or client.stats.num_blocks_to_disk < 8:
                await asyncio.sleep(0.05)
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            while client.is_ready:
                await asyncio.sleep(0.01)
            await client.evict_adapter(adapter)
            while not client.is_ready:
                await asyncio.sleep(0.05)
            assert await ask(client, "c", None) == (expected[0], 64)
            assert await ask(client, "d", adapter) == (expected[1], 0)
        finally:
            await client.stop()

    asyncio.run(scenario())
    local.close()
