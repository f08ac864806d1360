"""One follower: its part of the base, of the adapters and of the KV cache, and rank 0's commands.

It has no scheduler, no sampler and no clock. Steps and changes of tables are done by the thread
that receives commands, adapters' bytes are read, copied and zeroed by another one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import assert_never

import numpy as np

from ...adapters.block_reader import BlockReader
from ...adapters.extents import Extent
from ...adapters.identity import AdapterKey
from ...adapters.loaders import LoaderThreads, Pace
from ..config import EngineConfig
from ..execution.decode_graphs import open_decode_graphs, serves_graphs
from ..execution.profiling import profile_along
from ..kv.cache import KvCache
from ..memory.divided_memory import open_divided_memory
from ..memory.loader_duty import choose_duty
from ..messages import RankStats
from ..model.base_model import BaseModel
from ..model.block_preparation import BlockPreparation
from ..model.drafting_parts import open_drafting_parts
from ..model.layer_subset import drafting_layers
from ..model.row_magnitudes import RowMagnitudes
from ..model.sharded_base import load_sharded_base
from ..shards.group_links import GroupLinks
from ..shards.rank_sums import RankSums
from .adapter_files import AdapterFiles
from .commands import (
    ClearKv,
    Command,
    CompleteAdapter,
    CopyAdapter,
    CopyKv,
    DropAdapters,
    EraseExtent,
    ForgetRequests,
    FreePlace,
    GiveBackKv,
    JobCommand,
    JobDone,
    MoveAdapter,
    MoveKv,
    OpenPools,
    PlaceAdapter,
    PlaceAgain,
    PublishAdapter,
    RankReport,
    ReadAdapter,
    ResizeArena,
    RestoreKv,
    RetireAdapter,
    RunChunks,
    StartRank,
    StoreValue,
    SwapKvIn,
    SwapKvOut,
    ZeroKv,
    unpack_tables,
)
from .follower_arena import FollowerArena
from .follower_host import FollowerHost
from .follower_steps import FollowerSteps
from .rank_memory import RankMemory
from .rank_pipe import FollowerPipe

_log = logging.getLogger(__name__)

IDLE_SECONDS = 0.02
"""After so long without a command no step is due, and adapters may be loaded at full speed."""
BEAT_SECONDS = 0.5
"""How often an idle follower shows that it does not hang."""
REPORT_SECONDS = 1.0
"""How often it reports its memory, unless a step takes longer."""


def follow(
    config: EngineConfig,
    links: GroupLinks,
    pipe: FollowerPipe,
    rank: int,
    files: AdapterFiles,
) -> None:
    """Load this rank's part and do what rank 0 says, until it is gone.

    `files`: the adapters' files. Raises UnsupportedModel if the base cannot be divided,
    InvalidParameter for a proposer of layers that it does not have, RuntimeError if another rank
    has died.
    """
    base = load_sharded_base(config, links)
    drafting_layers(config, base.config.num_hidden_layers)  # both sides refuse it here
    profile_along(config, base, links.sums)
    try:
        pools = pipe.receive()
        assert isinstance(pools, OpenPools), "it is the first command"
        bound = base.bound_to(pools.base_id)
        follower = Follower(config, bound, pools, pipe, rank, files, links.sums)
        follower.steps.capture()
        _log.info("rank_ready", extra=asdict(follower.measure()))
        follower.run(links.pulse.beat)
    except (EOFError, OSError):
        return


class Follower:
    """The pools of one follower."""

    def __init__(
        self,
        config: EngineConfig,
        base: BaseModel,
        pools: OpenPools,
        pipe: FollowerPipe,
        rank: int,
        files: AdapterFiles,
        ranks: RankSums,
    ) -> None:
        """`rank`: its number in the group. `ranks`: the connections to those of its stage."""
        self.base = base
        self.pipe = pipe
        self._files = files
        duty = choose_duty(base.device) if config.loader_duty is None else config.loader_duty
        self._pace = Pace(duty)
        self._loader = LoaderThreads(1)
        layout = base.part.layout
        prepare = BlockPreparation(
            layout, base.extended, partial=base.partial, adds_vectors=ranks.place.rank == 0
        )
        self._magnitudes = RowMagnitudes(layout, base.partial)
        reader = BlockReader(base.part, prepare=prepare, pace=self._pace)
        self.host = FollowerHost(
            reader,
            config.adapter_host_bytes,
            base.dtype,
            page_locked=base.device.type == "cuda",
        )
        memory = open_divided_memory(
            pools.border,
            pools.kv_groups,
            pools.kv_block_bytes,
            has_spare_block=serves_graphs(config, base),
            device=base.device,
        )
        self.arena = FollowerArena(
            *(base.part.layout, pools.arena_bytes, base.dtype, base.device),
            pace=self._pace,
            reserved_bytes=pools.border.most_adapters if pools.border else 0,
            memory=memory.arena if memory else None,
        )
        base.attach_arena(self.arena)
        self._cache = KvCache(
            pools.kv_groups,
            base.kv_shapes,
            block_size=config.kv_block_size,
            kv_format=base.kv_format,
            device=base.device,
            num_swap_slots=pools.num_swap_slots,
            block_memory=memory.blocks if memory else None,
            has_spare_blocks=serves_graphs(config, base),
            num_open_slots=pools.num_open_slots,
        )
        drafting_parts = open_drafting_parts(config, base)
        graphs = open_decode_graphs(
            config,
            base,
            self._cache,
            self.arena,
            max_model_len=pools.max_model_len,
            is_shared=True,
        )
        self.steps = FollowerSteps(base, self._cache, self.arena, ranks, drafting_parts, graphs)
        self._memory = RankMemory(rank, base, self.arena, self._cache)
        self._report_time = 0.0
        """When the next report is due."""

    def run(self, beat: Callable[[], None]) -> None:
        """Until rank 0 is gone: raises EOFError or OSError then. Calls `beat` at each command and
        while there is none."""
        while True:
            if not self.pipe.has_message(IDLE_SECONDS):
                self._pace.is_busy = False
                while not self.pipe.has_message(BEAT_SECONDS):
                    beat()
                    self._report_if_due()
            beat()
            self._report_if_due()
            self._do(self.pipe.receive())

    def measure(self) -> RankStats:
        """Its memory now."""
        return self._memory.measure(
            host_bytes=self.host.pool.nbytes, host_used_bytes=self.host.used_bytes
        )

    def _report_if_due(self) -> None:
        now = time.monotonic()
        if now < self._report_time:
            return
        self._report_time = now + REPORT_SECONDS
        self.pipe.send(RankReport(self.measure()))

    def _do(self, command: Command) -> None:
        match command:
            case RunChunks():
                self._pace.is_busy = True
                self.steps.run(command)
            case ForgetRequests(request_ids):
                self.steps.masses.forget(request_ids)
            case (
                ZeroKv(operation)
                | CopyKv(operation)
                | SwapKvOut(operation)
                | SwapKvIn(operation)
                | GiveBackKv(operation)
                | RestoreKv(operation)
            ):
                self._cache.execute([operation])
            case MoveKv(tables, sources, targets):
                self._cache.move(unpack_tables(tables), sources, targets)
            case ClearKv(tables, start, end):
                self._cache.clear(unpack_tables(tables), start, end)
            case PlaceAdapter(key, placement):
                self.arena.occupy(placement, self.host[key])
            case PlaceAgain(row, placement):
                self.arena.occupy_again(row, placement)
            case PublishAdapter(placement):
                self.arena.publish(placement)
            case RetireAdapter(placement):
                self.arena.retire(placement)
            case FreePlace(placement):
                self.arena.free(placement)
            case ResizeArena(capacity):
                self.arena.resize(capacity)
            case ReadAdapter(_, key, paths, extent):
                self._begin(command, lambda: self._read(key, paths, extent))
            case CompleteAdapter(_, key, squares):
                own = squares[self.base.stages.place.stage]
                self._begin(command, lambda: self._complete(key, own))
            case DropAdapters(_, keys):
                self._begin(command, lambda: self.host.drop(keys))
            case CopyAdapter(_, key, placement):
                self._begin(command, lambda: self.arena.copy_into(placement, self.host[key]))
            case MoveAdapter(_, source, target):
                self._begin(command, lambda: self.arena.copy_between(source, target))
            case EraseExtent(_, placement):
                self._begin(command, lambda: self.arena.erase(placement))
            case StartRank() | StoreValue() | OpenPools():
                raise AssertionError("the pools are open")
            case _:
                assert_never(command)

    def _read(self, key: AdapterKey, paths: Sequence[str], extent: Extent) -> tuple[bytes, ...]:
        with ExitStack() as opened:
            readable, missing = [], None
            for path in paths:  # all: rank 0's host sends each, whether or not another is missing
                try:
                    readable.append(opened.enter_context(self._files.open(path)))
                except FileNotFoundError as exc:
                    missing = exc
            if missing is not None:
                raise missing
            self.host.read(key, readable, extent)
        squares = self._magnitudes.squares(self.host[key])
        return tuple(own.tobytes() for own in squares)

    def _complete(self, key: AdapterKey, squares: Sequence[bytes]) -> None:
        whole = [np.frombuffer(values, dtype=np.float64) for values in squares]
        self._magnitudes.complete(self.host[key], whole)

    def _begin(self, command: JobCommand, work: Callable[[], tuple[bytes, ...] | None]) -> None:
        self._loader.submit(0, self._finish, command.job, work)

    def _finish(self, job: int, work: Callable[[], tuple[bytes, ...] | None]) -> None:
        """Do a job and answer, whatever comes of it: rank 0 waits."""
        try:
            squares = work()
        except FileNotFoundError as exc:
            done = JobDone(job, str(exc), is_missing=True)
        except Exception as exc:
            done = JobDone(job, str(exc) or type(exc).__name__)
        else:
            done = JobDone(job, squares=squares or ())
        self.pipe.send(done)
