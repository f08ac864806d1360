"""Kills one rank of a group at a certain command, in mixed traffic, and watches every request."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, get_args

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.tier import Tier
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import EngineError
from loraplex.engine.messages import FinishReason, RequestFinished, TokensGenerated
from loraplex.engine.process.client import EngineClient
from loraplex.engine.process.request_stream import RequestEvent
from loraplex.engine.process.supervisor import RestartPolicy
from loraplex.engine.ranks.commands import Command
from loraplex.engine.shards.rank_place import GroupShape
from support.engine import make_request
from support.planned_kill import IN_FOLLOWERS, Moment, PlannedKill
from support.rank_processes import until
from support.rank_traffic import Traffic, served, wave

HANG_SECONDS = 10.0
AT_START = {"StartRank", "StoreValue", "OpenPools"}
OF_THE_BORDER = {"ResizeArena", "GiveBackKv", "RestoreKv"}
"""The border of these groups is fixed."""
KINDS = tuple(sorted({kind.__name__ for kind in get_args(Command)} - AT_START - OF_THE_BORDER))


class Outcome(NamedTuple):
    """What became of a group and its requests."""

    happened: bool
    """Whether the command came, and a rank was killed at it."""
    num_hanging: int
    """Requests that had not ended when nothing was heard for HANG_SECONDS though the group was
    ready."""
    num_uncoded: int
    """Requests that ended neither whole nor with a code; after the group is back, those that did
    not end whole."""


class _Block(NamedTuple):
    """A block on the local disk."""

    path: Path
    tier: Tier


class Watched:
    """A request, its end, and when something was heard of it."""

    def __init__(self, max_tokens: int) -> None:
        self.heard_at = time.monotonic()
        self.end: RequestFinished | None = None
        self._num_missing = max_tokens

    @property
    def is_whole(self) -> bool:
        """Whether it has all of its tokens, or those until its grammar ended."""
        if self.end is None or self.end.error is not None:
            return False
        return self.end.reason is FinishReason.STOP or not self._num_missing

    @property
    def is_uncoded(self) -> bool:
        """Whether it ended neither whole nor with a code."""
        if self.end is None or self.is_whole:
            return False
        return self.end.error is None or not self.end.error.code

    def take(self, event: RequestEvent) -> None:
        """Note one event."""
        self.heard_at = time.monotonic()
        if isinstance(event, TokensGenerated):
            self._num_missing -= len(event.token_ids)
        if isinstance(event, RequestFinished):
            self.end = event


def plans(folder: Path, shape: GroupShape) -> Iterator[PlannedKill]:
    """For each kind of command one kill, at a drawn moment."""
    name = f"{shape.ranks_per_stage}x{shape.num_stages}"
    rng = random.Random(name)
    for kind in KINDS:
        moments = [each for each in Moment if each is not Moment.EXCHANGE or kind == "RunChunks"]
        moment = rng.choice(moments)
        rank = rng.randrange(1 if moment in IN_FOLLOWERS else 0, shape.size)
        number = rng.randrange(1, 20) if kind == "RunChunks" else 1
        yield PlannedKill(kind, number, moment, rank, str(folder / f"{kind}-{name}"))


async def kill_at(plan: PlannedKill, traffic: Traffic, shape: GroupShape) -> Outcome:
    """Serve two waves while a rank is killed; then the group has to serve again.

    Raises FileExistsError for a plan that was carried out before: no rank would be killed.
    """
    if Path(plan.marker).exists():
        raise FileExistsError(plan.marker)
    blocks = traffic.blocks

    async def fetch(key: AdapterKey) -> _Block:
        return _Block(blocks[key], Tier.DISK)

    client = EngineClient(
        EngineConfig(str(traffic.base), device="cpu", **traffic.settings(shape)),
        on_adapter_wanted=fetch,
        command=plan.command(),
        restarts=RestartPolicy(max_deaths=1000),
    )
    try:
        await client.start()
        keys = list(blocks)
        watched = _submit(client, keys, "first")
        deletion = asyncio.create_task(_delete(client, keys[0]))
        watched += _submit(client, keys[1:], "second")
        hanging = await num_hanging(client, watched)
        await until(lambda: client.is_ready)
        after = _submit(client, keys[1:2], "after")
        hanging += await num_hanging(client, after)
        deletion.cancel()
    finally:
        await client.stop()
    uncoded = sum(each.is_uncoded for each in watched)
    uncoded += sum(each.end is not None and not each.is_whole for each in after)
    return Outcome(Path(plan.marker).exists(), hanging, uncoded)


def _submit(client: EngineClient, keys: Sequence[AdapterKey], name: str) -> list[Watched]:
    watched = []
    for number, (prompt, key, settings) in enumerate(wave(keys, seed=1)):
        watched.append(Watched(settings["max_tokens"]))
        request = make_request(f"{name}-{number}", prompt, key, **served(settings, client.info))
        with suppress(EngineError):  # the group is down: the caller has its code
            client.submit(request, watched[-1].take)
            continue
        watched.pop()
    return watched


async def _delete(client: EngineClient, key: AdapterKey) -> None:
    await asyncio.sleep(0.2)
    with suppress(EngineError, AdapterError):  # the group is down
        await client.evict_adapter(key)


async def num_hanging(client: EngineClient, watched: Sequence[Watched]) -> int:
    """Wait until all have ended, or all are silent for too long while the group is ready.

    A request that waits for others to end is silent meanwhile, on a busy machine for long. One that
    hangs is left when they have ended.
    """
    ready_at = time.monotonic()
    while running := [each for each in watched if each.end is None]:
        if not client.is_ready:
            ready_at = time.monotonic()
        silent_since = max(ready_at, *(each.heard_at for each in watched))
        if time.monotonic() - silent_since > HANG_SECONDS:
            break
        await asyncio.sleep(0.05)
    return len(running)
