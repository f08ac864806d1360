"""What rank 0 tells the followers, and what they answer. Torch-free.

Followers decide nothing. Places in the arena and in host memory, operations on KV blocks and the
tokens of each step are rank 0's decisions, which the followers apply in the order of the commands.
A command with a `job` is done beside the steps, in the order of such commands, and is answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from ...adapters.extents import Extent, Placement
from ...adapters.identity import AdapterKey
from ..config import EngineConfig
from ..kv.layout import (
    CopyBlock,
    GiveBackBlocks,
    GiveUpSlots,
    KvGroup,
    KvOperation,
    RestoreBlocks,
    SwapIn,
    SwapOut,
    ZeroBlocks,
)
from ..kv.sequence_blocks import BlockTable
from ..memory.budget import Bounds
from ..messages import RankStats
from ..shards.rank_pulses import Pulse


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A command or an answer."""


# --- once, at the start --------------------------------------------------------------------------


class StartRank(Message, frozen=True):
    """All ranks have joined: connect to the others and load."""

    config: EngineConfig
    num_ranks_here: int
    """The ranks of the group on the follower's host."""


class StoreValue(Message, frozen=True):
    """What a `StoreGet` asked for."""

    value: bytes


class OpenPools(Message, frozen=True):
    """The sizes of the pools, which are the same on every rank, and the base's id."""

    base_id: str
    kv_groups: tuple[KvGroup, ...]
    num_swap_slots: tuple[int, ...]
    num_open_slots: int | None
    kv_block_bytes: tuple[int, ...]
    """Of a block of each group, on the rank with the largest."""
    arena_bytes: int
    border: Bounds | None
    """How far the border between the arena and the KV cache may move; None: it is fixed."""
    max_model_len: int


# --- adapters, beside the steps ------------------------------------------------------------------


class Job(Message, frozen=True):
    """Work on an adapter's bytes."""

    job: int


class ReadAdapter(Job, frozen=True):
    """Read the rank's part of an adapter's block to this extent of host memory."""

    key: AdapterKey
    paths: tuple[str, ...]
    """The files of the adapter's parts."""
    extent: Extent


class CompleteAdapter(Job, frozen=True):
    """Complete the magnitudes of a block that was read, see `RowMagnitudes`."""

    key: AdapterKey
    squares: tuple[tuple[bytes, ...], ...]
    """By stage, the sums over its ranks: fp64, in the machine's order."""


class DropAdapters(Job, frozen=True):
    """Zero these blocks in host memory."""

    keys: tuple[AdapterKey, ...]


class CopyAdapter(Job, frozen=True):
    """Copy a block from host memory to its place on the device."""

    key: AdapterKey
    placement: Placement


class MoveAdapter(Job, frozen=True):
    """Copy the bytes of one place to another."""

    source: Placement
    target: Placement


class EraseExtent(Job, frozen=True):
    """Zero the bytes of a retired place."""

    placement: Placement


# --- the arena's table, between steps ------------------------------------------------------------


class PlaceAdapter(Message, frozen=True):
    """An adapter that is in host memory gets a place on the device."""

    key: AdapterKey
    placement: Placement


class PlaceAgain(Message, frozen=True):
    """The adapter of a row gets a second place, to which it can be moved."""

    row: int
    placement: Placement


class PublishAdapter(Message, frozen=True):
    placement: Placement


class RetireAdapter(Message, frozen=True):
    placement: Placement


class FreePlace(Message, frozen=True):
    placement: Placement


class ResizeArena(Message, frozen=True):
    """The arena has this many elements from now on."""

    capacity: int


# --- KV blocks, between steps --------------------------------------------------------------------


class ZeroKv(Message, frozen=True):
    operation: ZeroBlocks


class CopyKv(Message, frozen=True):
    operation: CopyBlock


class SwapKvOut(Message, frozen=True):
    operation: SwapOut


class SwapKvIn(Message, frozen=True):
    operation: SwapIn


class GiveBackKv(Message, frozen=True):
    operation: GiveBackBlocks


class RestoreKv(Message, frozen=True):
    operation: RestoreBlocks


class MoveKv(Message, frozen=True):
    """Move entries of one sequence, see `KvCache.move`."""

    tables: tuple[bytes, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class ClearKv(Message, frozen=True):
    """Zero entries of one sequence, see `KvCache.clear`."""

    tables: tuple[bytes, ...]
    start: int
    end: int


# --- steps ---------------------------------------------------------------------------------------


class LeasedRow(msgspec.Struct, frozen=True, array_like=True):
    """The adapter that a sequence runs with. Each rank compares it with its own arena."""

    row: int
    generation: int
    key: AdapterKey


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """What a follower needs of a `SequenceChunk`, and its adapter."""

    token_ids: tuple[int, ...]
    start: int
    tables: tuple[bytes, ...]
    num_logits_rows: int
    tree: tuple[int, ...] | None
    is_prompt: bool
    num_evicted: int
    rotary_start: int
    num_base_tokens: int
    leased: LeasedRow | None


class Observed(msgspec.Struct, frozen=True, array_like=True):
    """What a follower needs of an `Observation`."""

    request_id: str
    rows: tuple[int, int]
    first_place: int
    num_cached: int
    table: bytes
    is_continued: bool
    """Whether the follower has observed earlier tokens of this request."""
    is_last: bool
    compaction: Compacted | None


class Compacted(msgspec.Struct, frozen=True, array_like=True):
    """See `Compaction`."""

    target: bytes
    budget: int
    num_recent: int
    pool_width: int


class Replayed(msgspec.Struct, frozen=True, array_like=True):
    """What a captured graph must serve, see `LoraNeeds`."""

    rank: int
    has_vectors: bool
    has_experts: bool


class RunChunks(Message, frozen=True):
    """One forward pass."""

    chunks: tuple[Chunk, ...]
    observed: tuple[Observed, ...] = ()
    drafting: str | None = None
    """The name of the drafting part that it runs; None: the whole base."""
    num_pending: int = 0
    """The first rows, whose tokens rank 0 broadcasts when the step begins."""
    replayed: Replayed | None = None
    """All ranks replay this graph, and capture it before if none has; None: kernel by kernel."""


class ForgetRequests(Message, frozen=True):
    """The attention that was observed of these requests is of no use any more."""

    request_ids: tuple[str, ...]


JobCommand: TypeAlias = (
    ReadAdapter | CompleteAdapter | DropAdapters | CopyAdapter | MoveAdapter | EraseExtent
)
KvCommand: TypeAlias = ZeroKv | CopyKv | SwapKvOut | SwapKvIn | GiveBackKv | RestoreKv
Command: TypeAlias = (
    StartRank
    | StoreValue
    | OpenPools
    | JobCommand
    | PlaceAdapter
    | PlaceAgain
    | PublishAdapter
    | RetireAdapter
    | FreePlace
    | ResizeArena
    | KvCommand
    | MoveKv
    | ClearKv
    | RunChunks
    | ForgetRequests
)


# --- answers -------------------------------------------------------------------------------------


class Joined(Message, frozen=True):
    """The follower's process runs."""

    host: str
    """The name of its host."""


class StoreSet(Message, frozen=True):
    """A value through which the ranks find each other, see `RankStore`."""

    key: str
    value: bytes


class StoreGet(Message, frozen=True):
    """Asks for a value; `StoreValue` comes once a rank has set it."""

    key: str


class PulseReport(Message, frozen=True):
    """The follower's signs of life."""

    pulse: Pulse


class JobDone(Message, frozen=True):
    """A job has ended."""

    job: int
    error: str | None = None
    is_missing: bool = False
    """The file was not there."""
    squares: tuple[bytes, ...] = ()
    """After `ReadAdapter`: the follower's own, for each magnitude that is to be completed."""


class RankReport(Message, frozen=True):
    """The follower's memory, now and then."""

    stats: RankStats


Answer: TypeAlias = Joined | StoreSet | StoreGet | PulseReport | JobDone | RankReport


def kv_command(operation: KvOperation) -> KvCommand:
    """The command to execute an operation on KV blocks."""
    match operation:
        case ZeroBlocks():
            return ZeroKv(operation)
        case CopyBlock():
            return CopyKv(operation)
        case SwapOut():
            return SwapKvOut(operation)
        case SwapIn():
            return SwapKvIn(operation)
        case GiveBackBlocks():
            return GiveBackKv(operation)
        case RestoreBlocks():
            return RestoreKv(operation)
        case GiveUpSlots():
            raise AssertionError("in a group of ranks the border in host memory is fixed")
        case _:
            raise AssertionError("a group of ranks has no prefixes on disk")


def pack_tables(tables: Sequence[BlockTable]) -> tuple[bytes, ...]:
    """Block tables as bytes: int64, in the machine's order."""
    return tuple(table.tobytes() for table in tables)


def unpack_tables(packed: Sequence[bytes]) -> list[BlockTable]:
    """What `pack_tables` packed, read-only."""
    return [np.frombuffer(table, dtype=np.int64) for table in packed]
