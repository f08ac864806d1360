"""The memory that a load needs beside a base that is not loaded: the memory plan turned around."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ...adapters.block import BlockPlan
from ..config import EngineConfig
from ..errors import InvalidParameter, UnsupportedModel
from ..kv.groups import LayerKvShape
from ..memory.border_plan import ARENA_UNIT_BYTES
from ..memory.kv_budget import KvDemand, open_bytes_of, wanted_bytes
from ..memory.kv_demands import kv_demands, kv_groups
from ..memory.plan import RESERVE_FRACTION
from ..model.base_model import check_rollback
from ..model.base_stages import merge_shapes
from ..model.expected_base import ExpectedBase, expect_base
from ..model.layer_subset import drafting_layers
from ..tuning.trainer_needs import RecipeLimits, trainer_needs
from .planned_drafts import PlannedDrafts
from .step_estimate import activation_bytes, graph_bytes


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
    trainer: RecipeLimits | None = None
    """A trainer on the same device; None: there is none."""


@dataclass(frozen=True, slots=True)
class LoadNeeds:
    """Bytes by purpose, on one rank: pools are of the same size on all."""

    weight_bytes: int
    """Of the rank that holds most."""
    rounded_bytes: int
    """The rounded copy of them for drafts."""
    draft_weight_bytes: int
    """A draft model and heads; on the rank that drafts."""
    stage_weight_bytes: tuple[int, ...]
    """By stage, of the rank of the stage that holds most."""
    ranks_per_stage: int
    kv_bytes_per_token: int
    """Over all layers, while a sequence is within their windows."""
    state_bytes: int
    """States of a sequence, whatever its length."""
    kv_bytes: int
    """Of all sequences at their full length, states included."""
    draft_kv_bytes: int
    """The KV caches of a draft model and of a head: as many blocks."""
    adapter_bytes: int
    """One adapter."""
    arena_bytes: int
    host_cache_bytes: int
    activation_bytes: int
    """Of a full step; estimated."""
    graph_bytes: int
    """Captured decode steps; estimated, 0 on the CPU."""
    reserve_bytes: int
    """On the device."""
    trainer_bytes: int
    """A trainer with its own copy of the base; estimated."""
    is_host: bool
    """The device is the host: it holds the host cache too."""

    @property
    def device_bytes(self) -> int:
        """Of the rank that holds most."""
        weights = self.weight_bytes + self.rounded_bytes + self.draft_weight_bytes
        return weights + self.pool_bytes + self.reserve_bytes + self.trainer_bytes

    @property
    def pool_bytes(self) -> int:
        """All but weights, their copy, reserve and trainer."""
        host = self.host_cache_bytes if self.is_host else 0
        step = self.activation_bytes + self.graph_bytes
        return self.kv_bytes + self.draft_kv_bytes + self.arena_bytes + host + step


class LoadPlanner:
    """Computes what loads need beside one base."""

    def __init__(self, config: EngineConfig) -> None:
        """Reads the headers of the base's files. Raises UnsupportedModel and InvalidParameter."""
        device = torch.device(config.device)
        if config.pipeline_parallel_size > 1 and device.type != "cpu":
            raise UnsupportedModel(
                "pipeline parallelism is supported on the CPU only: give --device cpu"
            )
        self._config = config
        self._stages = [
            expect_base(config, device, stage=stage)
            for stage in range(config.pipeline_parallel_size)
        ]
        self._shapes: list[list[LayerKvShape]] = []
        for stage in self._stages:
            if stage.kv_shapes is None:
                raise UnsupportedModel(
                    "The KV cache of this model type is only known once its weights are loaded"
                )
            # A start refuses them only when it has loaded the base.
            check_rollback(config, stage.kv_shapes)
            drafting_layers(config, len(stage.kv_shapes))
            self._shapes.append(stage.kv_shapes)
        self._drafts = PlannedDrafts.of(config, self._stages[0])

    @property
    def max_model_len(self) -> int:
        """The longest sequence of the base."""
        return self._stages[0].max_model_len

    def needs(self, load: Load) -> LoadNeeds:
        """Raises InvalidParameter for a context that the base does not have, and for targets that
        none of its layers has."""
        if load.context > self.max_model_len:
            raise InvalidParameter(
                "context", f"The longest sequence of this model has {self.max_model_len} tokens"
            )
        config = replace(self._config, max_num_seqs=load.num_sequences, max_model_len=load.context)
        demands = self._demands(config)
        attending = [demand.bytes_per_block for demand in demands if not demand.group.holds_states]
        adapter_bytes = max(_adapter_bytes(stage, load) for stage in self._stages)
        arena_bytes = -(-load.num_active * adapter_bytes // ARENA_UNIT_BYTES) * ARENA_UNIT_BYTES
        weights = tuple(stage.weight_bytes for stage in self._stages)
        kv_bytes = open_bytes_of(demands) + wanted_bytes(demands, load.context)
        drafts = self._drafts.needs(config)
        num_blocks = kv_bytes // sum(demand.bytes_per_block for demand in demands)
        activations = max(activation_bytes(config, stage) for stage in self._stages)
        needs = LoadNeeds(
            weight_bytes=max(weights),
            rounded_bytes=max(stage.rounded_bytes for stage in self._stages),
            draft_weight_bytes=drafts.weight_bytes,
            stage_weight_bytes=weights,
            ranks_per_stage=config.tensor_parallel_size,
            kv_bytes_per_token=sum(attending) // config.kv_block_size,
            state_bytes=sum(demand.bytes_per_block for demand in demands) - sum(attending),
            kv_bytes=kv_bytes,
            draft_kv_bytes=num_blocks * drafts.block_bytes,
            adapter_bytes=adapter_bytes,
            arena_bytes=arena_bytes,
            host_cache_bytes=load.num_known * adapter_bytes,
            activation_bytes=max(activations, drafts.activation_bytes) + drafts.reading_bytes,
            graph_bytes=graph_bytes(config, self._stages[-1]) + drafts.graph_bytes,
            reserve_bytes=0,
            trainer_bytes=self._trainer_bytes(load),
            is_host=self._stages[0].device_type == "cpu",
        )
        pools = needs.pool_bytes
        return replace(needs, reserve_bytes=int(pools / (1 - RESERVE_FRACTION)) - pools + 1)

    def most_sequences(self, load: Load, memory_bytes: int) -> int:
        """How many sequences of this load fit into the memory of each rank, at most as many as a
        step has tokens for; 0: not one."""
        counts = range(1, self._config.max_num_batched_tokens)
        return bisect_right(
            counts,
            memory_bytes,
            key=lambda count: self.needs(replace(load, num_sequences=count)).device_bytes,
        )

    def _trainer_bytes(self, load: Load) -> int:
        if load.trainer is None:
            return 0
        base = self._whole
        needs = trainer_needs(
            (part for projection in base.projections for part in projection.slices),
            load.trainer,
            weight_bytes=base.weight_bytes,
            vocab_size=base.vocab_size,
            num_query_heads=base.num_query_heads,
        )
        return needs.total_bytes

    @cached_property
    def _whole(self) -> ExpectedBase:
        """The base of one rank."""
        if self._config.num_ranks == 1:
            return self._stages[0]
        config = replace(
            self._config,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            enable_expert_parallel=False,
        )
        return expect_base(config, torch.device(config.device))

    def _demands(self, config: EngineConfig) -> tuple[KvDemand, ...]:
        base, shapes = self._stages[0], merge_shapes(self._shapes)
        max_model_len = config.max_model_len or base.max_model_len
        return kv_demands(
            config,
            kv_groups(config, shapes, max_model_len=max_model_len),
            self._shapes,
            base.kv_format,
            max_model_len=max_model_len,
            device_type=base.device_type,
        )


def _adapter_bytes(base: ExpectedBase, load: Load) -> int:
    """Of the rank's part of one adapter."""
    ends = [each.name.rpartition(".")[2] for each in base.part.whole.slices]
    for target in load.targets:
        if target not in ends:
            raise InvalidParameter(
                "target", f"No layer is called {target}. There are {', '.join(sorted(set(ends)))}"
            )
    touched = [index for index, end in enumerate(ends) if not load.targets or end in load.targets]
    plan: BlockPlan = base.part.plan(dict.fromkeys(touched, load.rank), ())
    return plan.num_elements * base.dtype.itemsize
