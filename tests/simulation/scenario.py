"""The scenario of one seed: sizes and fault rates.

Sizes are small, so that within a few hundred steps every resource is exhausted and recovers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.kv.layout import STATE_WINDOW, KvGroup
from loraplex.engine.memory.budget import Bounds
from loraplex.engine.memory.host_plan import SharedHostMemory
from loraplex.engine.messages import LatencyTargets
from loraplex.engine.model.rope import RotaryContexts
from loraplex.engine.scheduling.scheduler import SchedulerLimits
from loraplex.kernels.attention_window import AttentionWindow

from .border import draw_border, draw_host_memory
from .device import StepSeconds

ARENA_CELLS = 16


@dataclass(frozen=True)
class Tenant:
    """Who asks, how often in comparison, and with which adapters (None: the base alone)."""

    tenant_id: str
    weight: float
    demand: float
    adapters: tuple[AdapterKey | None, ...]


@dataclass(frozen=True)
class Scenario:
    """Everything that a seed fixes before the first step."""

    seed: int
    limits: SchedulerLimits
    rotary_contexts: RotaryContexts
    groups: tuple[KvGroup, ...]
    border: Bounds | None
    """How far the border between KV blocks and arena moves; None: it is fixed."""
    host_memory: SharedHostMemory | None
    """What adapters and KV blocks share on the host; None: each has its own."""
    num_swap_slots: tuple[int, ...]
    """Per group, at most."""
    num_disk_slots: tuple[int, ...]
    """Per group; empty: no prefix goes to the disk."""
    prefix_caching: bool
    tenants: tuple[Tenant, ...]
    adapter_sizes: dict[AdapterKey, int]
    arena_cells: int
    host_cells: int
    arrivals: float
    """Requests per step, on average."""
    hostility: float
    """How often faults strike, in proportion."""
    mishaps: float
    """Part of the store's answers that are failures."""
    true_seconds: StepSeconds
    swap_block_seconds: float
    """To move one block between device and host."""
    deadline_seconds: float
    """The order of magnitude of the deadlines that some requests have."""
    max_draft_tokens: int
    """0: plain decoding."""
    draft_error: float
    """Part of the draft tokens that are drawn at random."""
    is_async: bool
    """Whether steps are scheduled while others are in flight."""
    num_stages: int
    """Steps that are in flight together, each with other requests; 1: as without a pipeline."""

    @classmethod
    def draw(cls, seed: int) -> Scenario:
        rng = Random(seed)
        block_size = rng.choice((2, 3, 4, 4, 8))
        max_model_len = block_size * rng.randint(4, 16)
        max_num_seqs = rng.randint(2, 10)
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.randint(1, 40),
            max_model_len=max_model_len,
            block_size=block_size,
            max_read_rows=(1, 5, 40)[seed % 3],
            targets=LatencyTargets(itl_seconds=rng.choice((None, 0.004, 0.02))),
            max_queued=rng.choice((12, 40, 1000)),
            max_queued_per_tenant=rng.choice((6, 20, 1000)),
            tenant_cap=rng.choice((0.4, 0.6, 1.0)),
        )
        groups = _draw_groups(rng, limits)
        if has_states := seed % 5 == 2:
            states = _draw_states(seed, limits)
            groups = (states,) if seed % 4 == 2 else (*groups, states)
        is_async = seed % 4 > 0
        num_stages = {5: 2, 9: 3}.get(seed % 10, 1) if is_async else 1
        limits = replace(
            limits,
            kv_block_bytes=(1000,) * len(groups),
            max_concurrent_batches=num_stages,
            targets=LatencyTargets(
                (0.02, 0.1, 0.5)[seed % 3] if seed % 7 in (1, 3, 6) else None,
                limits.targets.itl_seconds,
            ),
        )
        arena_cells = ARENA_CELLS * rng.choice((1, 2, 2))
        border, groups = draw_border(seed, groups, arena_cells, -(-max_model_len // block_size))
        tenants, sizes = _draw_tenants(rng, arena_cells)
        drawn_slots = _draw_swap_slots(rng, groups)
        prefix_caching = rng.random() < 0.8
        has_disk = prefix_caching and any(drawn_slots)
        host_cells = rng.randint(arena_cells, 5 * arena_cells)
        host_memory, num_swap_slots = draw_host_memory(seed, groups, drawn_slots, host_cells)
        return cls(
            seed=seed,
            limits=limits,
            rotary_contexts=_draw_contexts(seed, max_model_len),
            groups=groups,
            border=border,
            host_memory=host_memory,
            num_swap_slots=num_swap_slots,
            num_disk_slots=_draw_disk_slots(seed, groups) if has_disk else (),
            prefix_caching=prefix_caching,
            tenants=tenants,
            adapter_sizes=sizes,
            arena_cells=arena_cells,
            host_cells=host_cells,
            arrivals=rng.choice((0.1, 0.3, 0.6, 1.2)),
            hostility=rng.choice((0.5, 1.0, 2.0)),
            mishaps=rng.choice((0.0, 0.05, 0.2)),
            true_seconds=StepSeconds(
                base=rng.uniform(1e-4, 5e-3),
                per_prefill_token=rng.uniform(1e-5, 5e-4),
                per_decode=rng.uniform(1e-5, 2e-4),
                per_context_token=rng.uniform(1e-8, 1e-5),
                per_draft_token=rng.uniform(1e-6, 1e-4),
            ),
            swap_block_seconds=rng.choice((1e-6, 1e-6, 2e-5, 5e-3)),
            deadline_seconds=rng.choice((0.02, 0.1, 0.5)),
            max_draft_tokens=rng.choice((4, 2 * block_size + 1, 0, 1)) * (not has_states),
            draft_error=rng.choice((0.2, 0.0, 0.9)),
            is_async=is_async,
            num_stages=num_stages,
        )


def _draw_contexts(seed: int, max_model_len: int) -> RotaryContexts:
    """Of a third of the bases, the keys depend on the greatest length of the request."""
    shorter = (max_model_len // 3, max_model_len // 2) if seed % 3 == 1 else ()
    return RotaryContexts((*shorter, max_model_len))


def _draw_groups(rng: Random, limits: SchedulerLimits) -> tuple[KvGroup, ...]:
    """One group that sees everything, some with windows, or windows only."""
    kind = rng.choice(("full", "full", "full", "mixed", "mixed", "window", "sinks"))
    blocks_alone = -(-limits.max_model_len // limits.block_size)
    full = KvGroup((0,), None, 0, max(2, int(blocks_alone * rng.uniform(0.6, 4.0))) + 1)
    if kind == "full":
        return (full,)
    size = rng.randint(1, 2 * limits.block_size + 3)
    sinks = rng.randint(1, limits.block_size + 1) if kind == "sinks" else 0
    chunk = min(limits.max_num_batched_tokens, limits.max_model_len)
    blocks_of_one = (size + sinks + chunk) // limits.block_size + 3
    num_blocks = int(blocks_of_one * rng.uniform(1.0, limits.max_num_seqs)) + 1
    is_chunked = not sinks and size % 2 == 0
    windowed = KvGroup((1,), AttentionWindow(size, is_chunked), sinks, num_blocks)
    return (full, windowed) if kind == "mixed" else (windowed,)


def _draw_states(seed: int, limits: SchedulerLimits) -> KvGroup:
    """A group of states, of which there may be too few for a full batch."""
    rng = Random(-seed)
    num_blocks = int(2 * limits.max_num_seqs * rng.uniform(0.5, 2.0))
    return KvGroup((2,), STATE_WINDOW, 0, max(2, num_blocks) + 1, holds_states=True)


def _draw_swap_slots(rng: Random, groups: tuple[KvGroup, ...]) -> tuple[int, ...]:
    part = rng.choice((0.0, 0.4, 1.5, 1.5))
    return tuple(int(group.num_blocks * part) for group in groups)


def _draw_disk_slots(seed: int, groups: tuple[KvGroup, ...]) -> tuple[int, ...]:
    """Of two thirds of the bases with host slots."""
    part = (0.0, 0.7, 3.0)[seed % 3]
    return tuple(int(group.num_blocks * part) for group in groups) if part else ()


def _draw_tenants(
    rng: Random, arena_cells: int
) -> tuple[tuple[Tenant, ...], dict[AdapterKey, int]]:
    """Tenants push the same contents: digests are equal across tenants, keys are not."""
    num_adapters = rng.choice((0, 1, 4, 8, 8))
    largest = rng.choice((4, 7, 9))
    sizes: dict[AdapterKey, int] = {}
    tenants = []
    for index in range(rng.randint(1, 5)):
        name = f"tenant{index}"
        keys = [AdapterKey(name, f"sha256:{number}") for number in range(num_adapters)]
        for number, key in enumerate(keys):
            is_too_large = number == 5 and rng.random() < 0.5
            sizes[key] = arena_cells + 1 if is_too_large else 1 + (number * 5) % largest
        base_share = [None] * (1 if keys else 2)
        tenants.append(
            Tenant(
                tenant_id=name,
                weight=rng.choice((1.0, 1.0, 1.0, 0.5, 3.0)),
                demand=rng.choice((0.3, 1.0, 1.0, 5.0)),
                adapters=(*base_share, *keys),
            )
        )
    return tuple(tenants), sizes
