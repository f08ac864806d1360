"""A group over two hosts serves what one rank serves, and lives and dies together."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loraplex.engine.errors import RankLost
from loraplex.engine.messages import RequestFinished
from loraplex.engine.parts import open_parts
from loraplex.engine.process.client import EngineClient
from loraplex.engine.ranks import rank_listener
from loraplex.engine.shards.rank_place import GroupShape
from support.cut_proxy import cut_proxy
from support.families import SERVED, save_family
from support.host_ranks import HOST, OtherHost, other_host, pids_of_ranks
from support.rank_processes import generate, make_config, make_request, serving, until
from support.rank_traffic import Traffic, is_same

pytestmark = pytest.mark.slow
STAGES = GroupShape(1, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("base"), *SERVED["llama"])


@pytest.fixture
def host(tmp_path: Path) -> OtherHost:
    return other_host(tmp_path)


async def fail_in_a_step(client: EngineClient, harm: Callable[[], None], max_tokens: int) -> None:
    """A request that runs while `harm` is done ends with a code. `max_tokens`: another one each
    time, because a request that several crashes have in common is refused."""
    stream = client.submit(make_request("long", max_tokens))
    await anext(stream)
    harm()
    finished = [event async for event in stream][-1]
    assert isinstance(finished, RequestFinished)
    assert finished.error is not None
    assert finished.error.code == "engine_restarted"


async def hang_in_a_step(client: EngineClient, victim: int) -> None:
    """The failure names the rank."""
    await anext(client.submit(make_request("long", max_tokens=202)))
    os.kill(victim, signal.SIGSTOP)
    await until(lambda: client.failure is not None)
    assert client.failure is not None
    assert "rank 1 " in client.failure.message


@pytest.mark.slow(is_sampled=False)
def test_mixed_traffic_has_the_tokens_of_one_rank(tmp_path: Path, host: OtherHost) -> None:
    """With adapters, whose files only rank 0's host has; two ranks of each stage."""
    traffic = Traffic(tmp_path)
    alone = traffic.serve(GroupShape(1, 1), has_drafts=False)
    with host.running([2, 3]):
        group = traffic.serve(GroupShape(2, 2), has_drafts=False, **host.settings(2))
        try:
            different = [
                name
                for name, answer in alone.answers.items()
                if not is_same(answer, group.answers[name])
            ]
        finally:
            group.close()
            alone.close()
    assert different == []


def test_the_group_is_back_after_any_end_of_a_rank_of_another_host(
    model: Path, host: OtherHost
) -> None:
    """One group through all of them: killed, hanging, and cut off within a command. Each starts its
    processes anew."""

    async def scenario() -> None:
        # The watch of the ranks names what hangs before the supervisor gives up.
        async with serving(model, STAGES, stall_seconds=60.0, **host.settings(1)) as client:
            expected = await generate(client, "before")

            async def recover(name: str, failing: Coroutine[Any, Any, None]) -> None:
                first = client.pid
                await failing
                await until(lambda: client.is_ready and client.pid != first)
                assert await generate(client, f"after-{name}") == expected

            (victim,) = pids_of_ranks(proxy.port)
            await recover(
                "killed", fail_in_a_step(client, partial(os.kill, victim, signal.SIGKILL), 200)
            )
            (victim,) = pids_of_ranks(proxy.port)
            await recover("stopped", hang_in_a_step(client, victim))
            await recover("cut", fail_in_a_step(client, partial(proxy.cut_after, 50), 201))

    with cut_proxy((HOST, host.port)) as proxy, host.running([1], port=proxy.port):
        asyncio.run(scenario())


def test_a_rank_that_never_joins_is_a_failure_that_names_it(
    model: Path, host: OtherHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_listener, "JOIN_SECONDS", 1.0)
    config = make_config(model, STAGES, **host.settings(1))
    with pytest.raises(RankLost, match="rank 1 has joined"):
        open_parts(config)


def test_a_host_with_another_secret_does_not_join(
    model: Path, host: OtherHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_listener, "JOIN_SECONDS", 30.0)
    stranger = OtherHost(host.port, tmp_path / "other.secret")
    stranger.secret.write_text("x" * 64)
    with stranger.running([1]), pytest.raises(RankLost, match="connections were refused"):
        open_parts(make_config(model, STAGES, **host.settings(1)))
