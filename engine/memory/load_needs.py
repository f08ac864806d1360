"""The memory that a load needs beside a base that is not loaded: the memory plan turned around.

A start also measures the activations of a full step, which are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...adapters.block import BlockPlan
from ...adapters.layout import BaseLayout
from ..config import EngineConfig
from ..errors import InvalidParameter
from ..model.expected_base import ExpectedBase
from .forecast import kv_demands
from .kv_budget import wanted_bytes
from .plan import ARENA_UNIT_BYTES, RESERVE_FRACTION


@dataclass(frozen=True, slots=True)
class Load:
    """What is served at once."""

    num_sequences: int
    context: int
    """Tokens of each sequence, prompt and output together."""
    num_active: int
    """Adapters that sequences use at once: they are on the device."""
    num_known: int
    """Adapters whose weights stay in host memory."""
    rank: int
    targets: Sequence[str] = ()
    """Last parts of the names of the layers that adapters change; empty: all linear layers."""


@dataclass(frozen=True, slots=True)
class LoadNeeds:
    """Bytes by purpose."""

    weight_bytes: int
    kv_bytes_per_token: int
    """Over all layers, while a sequence is within their windows."""
    state_bytes: int
    """States of a sequence, whatever its length."""
    kv_bytes: int
    """Of all sequences at their full length, states included."""
    adapter_bytes: int
    """One adapter."""
    arena_bytes: int
    host_cache_bytes: int
    reserve_bytes: int
    """On the device."""
    is_host: bool
    """The device is the host: it holds the host cache too."""

    @property
    def device_bytes(self) -> int:
        host = self.host_cache_bytes if self.is_host else 0
        pools = self.kv_bytes + self.arena_bytes + host
        return self.weight_bytes + pools + self.reserve_bytes


def needs_of_load(config: EngineConfig, base: ExpectedBase, load: Load) -> LoadNeeds:
    """Raises InvalidParameter for a context that the base does not have, and for targets that none
    of its layers has."""
    if load.context > base.max_model_len:
        raise InvalidParameter(
            "context", f"The longest sequence of this model has {base.max_model_len} tokens"
        )
    config = replace(config, max_num_seqs=load.num_sequences, max_model_len=load.context)
    demands = kv_demands(config, base)
    attending = [demand.bytes_per_block for demand in demands if not demand.group.holds_states]
    adapter_bytes = _adapter_bytes(base, load)
    is_host = base.device_type == "cpu"
    kv_bytes = wanted_bytes(demands, load.context)
    arena_bytes = -(-load.num_active * adapter_bytes // ARENA_UNIT_BYTES) * ARENA_UNIT_BYTES
    host_cache_bytes = load.num_known * adapter_bytes
    pools = kv_bytes + arena_bytes + (host_cache_bytes if is_host else 0)
    return LoadNeeds(
        weight_bytes=base.weight_bytes,
        kv_bytes_per_token=sum(attending) // config.kv_block_size,
        state_bytes=sum(demand.bytes_per_block for demand in demands) - sum(attending),
        kv_bytes=kv_bytes,
        adapter_bytes=adapter_bytes,
        arena_bytes=arena_bytes,
        host_cache_bytes=host_cache_bytes,
        reserve_bytes=int(pools / (1 - RESERVE_FRACTION)) - pools + 1,
        is_host=is_host,
    )


def _adapter_bytes(base: ExpectedBase, load: Load) -> int:
    layout = BaseLayout("unknown", tuple(base.projections))
    ends = [part.name.rpartition(".")[2] for part in layout.slices]
    for target in load.targets:
        if target not in ends:
            raise InvalidParameter(
                "target", f"No layer is called {target}. There are {', '.join(sorted(set(ends)))}"
            )
    touched = [index for index, end in enumerate(ends) if not load.targets or end in load.targets]
    ranks = dict.fromkeys(touched, load.rank)
    return BlockPlan(layout, ranks).num_elements * base.dtype.itemsize
