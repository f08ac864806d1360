"""The processes of a group live and die together."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.messages import RequestFinished
from loraplex.engine.process.client import EngineClient
from loraplex.engine.shards.rank_place import GroupShape
from support.engine import LocalEngine
from support.families import SERVED, STATES, save_family
from support.rank_processes import (
    PROMPT,
    follower_pids,
    generate,
    make_config,
    make_request,
    no_adapter,
    serving,
    until,
)

pytestmark = pytest.mark.slow


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("base"), *SERVED["llama"])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_group_is_back_after_a_follower_ends_in_a_step(
    model: Path, tmp_path: Path, how: signal.Signals
) -> None:
    local = LocalEngine(model, tmp_path)
    expected = local.tokens([local.submit(PROMPT, max_tokens=16, ignore_eos=True)])
    local.run()
    local.close()

    async def scenario() -> None:
        async with serving(model) as client:
            assert [await generate(client, "before")] == expected
            (follower,) = follower_pids(client)
            stream = client.submit(make_request("long", max_tokens=200))
            await anext(stream)
            os.kill(follower, how)
            finished = [event async for event in stream][-1]
            assert isinstance(finished, RequestFinished)
            assert finished.error is not None
            assert finished.error.code == "engine_restarted"
            await until(lambda: client.is_ready)
            assert not is_running(follower)
            assert [await generate(client, "after")] == expected

    asyncio.run(scenario())


@pytest.mark.parametrize("is_idle", [False, True], ids=["in a step", "while all are idle"])
def test_a_follower_that_hangs_is_named(model: Path, is_idle: bool) -> None:
    async def scenario() -> None:
        async with serving(model, stall_seconds=60.0) as client:
            expected = await generate(client, "before")
            first, victim = client.pid, follower_pids(client)[0]
            if not is_idle:
                await anext(client.submit(make_request("long", max_tokens=200)))
            os.kill(victim, signal.SIGSTOP)
            await until(lambda: client.failure is not None)
            assert client.failure is not None
            assert "rank 1 " in client.failure.message
            await until(lambda: client.is_ready and client.pid != first)
            assert await generate(client, "after") == expected

    asyncio.run(scenario())


def test_the_group_is_back_after_an_idle_follower_ends(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as client:
            expected = await generate(client, "before")
            first = client.pid
            os.kill(follower_pids(client)[0], signal.SIGKILL)
            await until(lambda: client.is_ready and client.pid != first)
            assert await generate(client, "after") == expected

    asyncio.run(scenario())


def test_the_followers_end_with_rank_0(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model, GroupShape(4, 1)) as client:
            followers = follower_pids(client)
            assert len(followers) == 3
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: not any(map(is_running, followers)))
            await until(lambda: client.is_ready)
            last = follower_pids(client)
        await until(lambda: not any(map(is_running, last)))

    asyncio.run(scenario())


def test_a_base_that_cannot_be_divided_is_a_coded_failure(tmp_path: Path) -> None:
    mamba = save_family(tmp_path / "base", *STATES["mamba"])

    async def scenario() -> None:
        client = EngineClient(make_config(mamba), on_adapter_wanted=no_adapter)
        with pytest.raises(UnsupportedModel, match="it has no plan"):
            await client.start()
        await client.stop()

    asyncio.run(scenario())
