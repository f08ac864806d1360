"""A group over two hosts of which one is lost: all its processes end at the same moment."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from loraplex.engine.messages import RequestFinished
from loraplex.engine.process.client import EngineClient
from loraplex.engine.shards.rank_place import GroupShape
from support.command_kills import HANG_SECONDS
from support.families import SERVED, save_family
from support.host_ranks import HOST, OtherHost, other_host
from support.rank_processes import follower_pids, generate, make_request, serving, until
from support.server import LORAPLEX, child_environment

pytestmark = pytest.mark.slow
SHAPE = GroupShape(2, 2)
"""Two ranks on each host."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("base"), *SERVED["llama"])


@pytest.fixture
def host(tmp_path: Path) -> OtherHost:
    return other_host(tmp_path)


@contextmanager
def powered(host: OtherHost) -> Iterator[Callable[[], None]]:
    """The other host: `loraplex ranks` and its ranks. Yields what ends all of them at once."""
    address = ("--rank-address", f"{HOST}:{host.port}", "--rank-secret", str(host.secret))
    process = subprocess.Popen(
        [*LORAPLEX, "ranks", "2", "3", *address], env=child_environment(), start_new_session=True
    )

    def lose() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    try:
        yield lose
    finally:
        lose()


async def end_of_request(client: EngineClient, harm: Callable[[], None]) -> RequestFinished:
    """How a request ends that runs while `harm` is done. Raises TimeoutError if it hangs."""
    stream = client.submit(make_request("long", max_tokens=200))
    await anext(stream)
    harm()
    async with asyncio.timeout(HANG_SECONDS):
        finished = [event async for event in stream][-1]
    assert isinstance(finished, RequestFinished)
    return finished


def code_of(finished: RequestFinished) -> str | None:
    return finished.error.code if finished.error else None


def test_the_group_is_back_when_the_other_host_is_back(model: Path, host: OtherHost) -> None:
    async def scenario() -> None:
        with powered(host) as lose:
            async with serving(model, SHAPE, **host.settings(2)) as client:
                expected, first = await generate(client, "before"), client.pid
                finished = await end_of_request(client, lose)
                assert code_of(finished) == "engine_restarted"
                assert not client.is_ready
                with powered(host):
                    await until(lambda: client.is_ready and client.pid != first)
                    assert await generate(client, "after") == expected

    asyncio.run(scenario())


@pytest.mark.slow(is_sampled=False)
def test_the_group_is_back_after_the_ranks_of_rank_0_s_host_were_lost(
    model: Path, host: OtherHost
) -> None:
    async def scenario() -> None:
        with powered(host):
            async with serving(model, SHAPE, **host.settings(2)) as client:
                expected, first = await generate(client, "before"), client.pid
                assert first is not None
                victims = [first, *follower_pids(client)]
                assert len(victims) == 2

                def lose() -> None:
                    for victim in victims:
                        os.kill(victim, signal.SIGKILL)

                finished = await end_of_request(client, lose)
                assert code_of(finished) == "engine_restarted"
                await until(lambda: client.is_ready and client.pid != first)
                assert await generate(client, "after") == expected

    asyncio.run(scenario())
