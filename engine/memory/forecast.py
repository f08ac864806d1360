"""What fits beside a base that is not loaded, by the rules of the memory plan.

A start also measures the activations of a full step, which the forecast leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...adapters.block import BlockPlan
from ...adapters.layout import BaseLayout
from ..config import EngineConfig
from ..errors import InsufficientMemory
from ..model.expected_base import ExpectedBase
from .demands import BaseDemand
from .device_memory import DeviceMemory
from .kv_budget import KvDemand
from .kv_demands import kv_demands, kv_groups
from .plan import RESERVE_FRACTION, plan_memory

FORECAST_RANK = 16
"""Of the adapters that are counted, on all linear layers of the decoder."""


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """The pools beside a base's weights."""

    memory_bytes: int
    """For weights and pools together."""
    reserve_bytes: int
    host_cache_bytes: int
    """Adapters in host memory; 0 unless the device is the host."""
    kv_bytes_per_token: int
    """Over all layers, while a sequence is within their windows."""
    kv_bytes: int
    kv_tokens: int
    """Tokens that the layers that see all of a sequence hold; of a base without such layers, the
    tokens that its first group of layers that attend holds. 0 if none attends."""
    state_bytes: int
    """States of a sequence, whatever its length."""
    num_states: int
    """States of so many sequences and of prefixes in the prefix cache fit."""
    max_model_len: int
    """The longest sequence that fits."""
    arena_bytes: int
    adapter_bytes: int
    """One adapter of `FORECAST_RANK`."""
    refusal: str | None = None
    """Why the base does not fit; the pools are then 0."""

    @property
    def num_adapters(self) -> int:
        return self.arena_bytes // self.adapter_bytes if self.adapter_bytes else 0


def forecast_memory(config: EngineConfig, base: ExpectedBase, memory_bytes: int) -> MemoryForecast:
    """The pools of an engine that has `memory_bytes` for everything."""
    demands = expected_demands(config, base)
    available, is_host = memory_bytes - base.weight_bytes, base.device_type == "cpu"
    attending = [demand.bytes_per_block for demand in demands if not demand.group.holds_states]
    per_token = sum(attending) // config.kv_block_size
    state_bytes = sum(demand.bytes_per_block for demand in demands) - sum(attending)
    adapter_bytes = _adapter_elements(base) * base.dtype.itemsize
    try:
        plan = plan_memory(
            config,
            DeviceMemory(available, is_host=is_host),
            BaseDemand(base.weight_bytes, 0, demands, weight_format=base.weight_formats),
        )
    except InsufficientMemory as exc:
        return MemoryForecast(
            memory_bytes,
            0,
            0,
            kv_bytes_per_token=per_token,
            kv_bytes=0,
            kv_tokens=0,
            state_bytes=state_bytes,
            num_states=0,
            max_model_len=0,
            arena_bytes=0,
            adapter_bytes=adapter_bytes,
            refusal=str(exc),
        )
    blocks = [group.num_usable for group in plan.kv_groups]
    pairs = zip(blocks, plan.kv_block_bytes, strict=True)
    return MemoryForecast(
        memory_bytes=memory_bytes,
        reserve_bytes=int(available * RESERVE_FRACTION),
        host_cache_bytes=plan.host.adapter_bytes if is_host else 0,
        kv_bytes_per_token=per_token,
        kv_bytes=sum(count * size for count, size in pairs),
        kv_tokens=blocks[0] * config.kv_block_size if attending else 0,
        state_bytes=state_bytes,
        num_states=blocks[-1] if state_bytes else 0,
        max_model_len=plan.max_model_len,
        arena_bytes=plan.arena_bytes,
        adapter_bytes=adapter_bytes,
    )


def expected_demands(config: EngineConfig, base: ExpectedBase) -> tuple[KvDemand, ...]:
    """By KV group, before the base is loaded."""
    assert base.kv_shapes is not None, "known without values"
    groups = kv_groups(config, base.kv_shapes, max_model_len=base.max_model_len)
    return kv_demands(
        config,
        groups,
        (base.kv_shapes,),
        base.kv_format,
        max_model_len=base.max_model_len,
        device_type=base.device_type,
    )


def _adapter_elements(base: ExpectedBase) -> int:
    layout = BaseLayout("unknown", tuple(base.projections))
    return BlockPlan(layout, dict.fromkeys(range(len(layout.slices)), FORECAST_RANK)).num_elements
