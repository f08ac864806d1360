"""The processes of a group live and die together."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
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


def test_the_group_is_back_after_any_end_of_a_rank(model: Path, tmp_path: Path) -> None:
    """One group through all of them, each of which starts its processes anew."""
    local = LocalEngine(model, tmp_path)
    expected = local.tokens([local.submit(PROMPT, max_tokens=16, ignore_eos=True)])
    local.run()
    local.close()

    async def scenario() -> None:
        # The watch of the ranks names what hangs before the supervisor gives up.
        async with serving(model, stall_seconds=60.0) as client:
            assert [await generate(client, "before")] == expected
            for end in (
                kill_a_follower_in_a_step,
                kill_an_idle_follower,
                stop_a_follower_in_a_step,
                stop_an_idle_follower,
            ):
                first, victim = client.pid, follower_pids(client)[0]
                await end(client, victim)
                await until(partial(is_back, client, first))
                assert not is_running(victim)
                assert [await generate(client, f"after-{victim}")] == expected
            last = follower_pids(client)
        await until(lambda: not any(map(is_running, last)))

    asyncio.run(scenario())


def is_back(client: EngineClient, first: int | None) -> bool:
    """Whether another group serves than the one of this rank 0."""
    return client.is_ready and client.pid != first


async def kill_a_follower_in_a_step(client: EngineClient, victim: int) -> None:
    """The request ends with a code."""
    stream = client.submit(make_request("killed", max_tokens=200))
    await anext(stream)
    os.kill(victim, signal.SIGKILL)
    finished = [event async for event in stream][-1]
    assert isinstance(finished, RequestFinished)
    assert finished.error is not None
    assert finished.error.code == "engine_restarted"


async def kill_an_idle_follower(client: EngineClient, victim: int) -> None:
    os.kill(victim, signal.SIGKILL)


async def stop_a_follower_in_a_step(client: EngineClient, victim: int) -> None:
    # Another length: a request that several crashes have in common is refused.
    await anext(client.submit(make_request("stopped", max_tokens=201)))
    await stop_an_idle_follower(client, victim)


async def stop_an_idle_follower(client: EngineClient, victim: int) -> None:
    """The failure names its rank."""
    known = client.failure
    os.kill(victim, signal.SIGSTOP)
    await until(lambda: client.failure is not None and client.failure is not known)
    assert client.failure is not None
    assert "rank 1 " in client.failure.message


@pytest.mark.slow(is_sampled=False)
def test_the_group_is_back_after_the_supervisor_has_given_it_up(model: Path) -> None:
    """It sees a stall before the ranks see which of them hangs."""

    async def scenario() -> None:
        async with serving(model) as client:
            (follower,) = follower_pids(client)
            stream = client.submit(make_request("long", max_tokens=200))
            await anext(stream)
            os.kill(follower, signal.SIGSTOP)
            finished = [event async for event in stream][-1]
            assert isinstance(finished, RequestFinished)
            assert finished.error is not None
            assert finished.error.code == "engine_restarted"
            await until(lambda: client.is_ready)
            assert not is_running(follower)

    asyncio.run(scenario())


def test_all_followers_end_with_rank_0(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model, GroupShape(4, 1)) as client:
            followers = follower_pids(client)
            assert len(followers) == 3
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: not any(map(is_running, followers)))

    asyncio.run(scenario())


def test_a_base_that_cannot_be_divided_is_a_coded_failure(tmp_path: Path) -> None:
    mamba = save_family(tmp_path / "base", *STATES["mamba"])

    async def scenario() -> None:
        client = EngineClient(make_config(mamba), on_adapter_wanted=no_adapter)
        with pytest.raises(UnsupportedModel, match="it has no plan"):
            await client.start()
        await client.stop()

    asyncio.run(scenario())
