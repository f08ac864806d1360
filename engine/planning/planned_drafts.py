"""What a draft model and heads take beside a base that is not loaded, from their files' headers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ...kernels.linear_packing import choose_linear
from ...kernels.linear_sizes import linear_bytes
from ..checkpoint.files import locate_heads, naming_the_draft
from ..config import EngineConfig, source_of
from ..errors import UnsupportedModel
from ..kv.cache import KvFormat
from ..kv.groups import LayerKvShape, one_group
from ..memory.kv_demands import block_bytes
from ..model.base_model import check_rollback, weight_format
from ..model.expected_base import ExpectedBase, expect_base
from ..model.load_quantization import LoadQuantization
from ..speculation import eagle, medusa
from ..speculation.draft_loading import check_tokens, draft_config, draft_name
from ..speculation.eagle_checkpoint import ExpectedHead, expect_head
from ..speculation.head_graphs import head_graph_bytes
from ..speculation.medusa_checkpoint import expected_values
from .step_estimate import activation_bytes, captures_graphs, draft_graph_bytes
from .unwritten_base import planned_base


class DraftNeeds(NamedTuple):
    """Bytes; zeros without proposers that have weights of their own."""

    weight_bytes: int
    block_bytes: int
    """One block of each of their KV caches, which have as many blocks as the base's."""
    activation_bytes: int
    """Of a draft model's step, which never runs at the same time as the base's."""
    reading_bytes: int
    """The hidden states that heads read, beside any step."""
    graph_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedDrafts:
    """The proposers of a configuration that have weights of their own."""

    model: ExpectedBase | None
    medusa_bytes: int
    head: _PlannedHead | None

    @classmethod
    def of(cls, config: EngineConfig, base: ExpectedBase) -> PlannedDrafts:
        """Raises InvalidParameter and UnsupportedModel, as their loaders do, for everything but
        the weights' values and the bases that they were made for."""
        given = [entry.partition(":")[::2] for entry in config.speculation]
        medusas = {checkpoint for name, checkpoint in given if source_of(name) == medusa.CHAINS}
        heads = [checkpoint for name, checkpoint in given if source_of(name) == eagle.NAME]
        return cls(
            _draft_model(config, base),
            sum(_medusa_bytes(checkpoint, base) for checkpoint in medusas),
            _planned_head(config, heads[0], base) if heads else None,
        )

    def needs(self, config: EngineConfig) -> DraftNeeds:
        """With the sequences and lengths of this configuration."""
        model, head = self.model, self.head
        return DraftNeeds(
            sum((part.weight_bytes for part in (model, head) if part), self.medusa_bytes),
            (_block_bytes(config, model) if model else 0) + (head.block_bytes if head else 0),
            activation_bytes(config, model) if model else 0,
            head.reading_bytes(config) if head else 0,
            (draft_graph_bytes(config, model) if model else 0)
            + (head.graph_bytes(config) if head else 0),
        )


@dataclass(frozen=True, slots=True)
class _PlannedHead:
    weight_bytes: int
    block_bytes: int
    feature_sizes: tuple[int, int]
    """See `DraftHead`."""
    num_draft_tokens: int
    base: ExpectedBase

    def graph_bytes(self, config: EngineConfig) -> int:
        if not captures_graphs(config, self.base):
            return 0
        return head_graph_bytes(
            config,
            feature_size=self.feature_sizes[1],
            num_draft_tokens=self.num_draft_tokens,
            max_model_len=config.max_model_len or self.base.max_model_len,
            num_heads=1,
        )

    def reading_bytes(self, config: EngineConfig) -> int:
        return eagle.read_values(config, self.feature_sizes) * self.base.dtype.itemsize


def _draft_model(config: EngineConfig, base: ExpectedBase) -> ExpectedBase | None:
    name = draft_name(config)
    if name is None:
        return None
    whole = replace(config, tensor_parallel_size=1, pipeline_parallel_size=1)
    with naming_the_draft(name), planned_base(name) as folder:
        own = draft_config(whole, Path(folder))
        check_tokens(Path(folder), base.model_dir, base.vocab_size)
        draft = expect_base(own, torch.device(config.device))
        if draft.kv_shapes is None:
            raise UnsupportedModel("its KV cache is only known once its weights are loaded")
        check_rollback(own, draft.kv_shapes)
        return draft


def _block_bytes(config: EngineConfig, model: ExpectedBase) -> int:
    assert model.kv_shapes is not None, "checked before"
    (group,) = one_group(len(model.kv_shapes), 2)
    return block_bytes(config, group, [model.kv_shapes], model.kv_format)


def _medusa_bytes(checkpoint: str, base: ExpectedBase) -> int:
    num_values = expected_values(
        locate_heads(checkpoint), hidden_size=base.hidden_size, vocab_size=base.vocab_size
    )
    return num_values * base.dtype.itemsize


def _planned_head(config: EngineConfig, checkpoint: str, base: ExpectedBase) -> _PlannedHead:
    assert base.kv_shapes is not None, "checked before"
    expected = expect_head(
        locate_heads(checkpoint),
        hidden_size=base.hidden_size,
        vocab_size=base.vocab_size,
        num_layers=len(base.kv_shapes),
    )
    (group,), own, fc = one_group(1, 2), expected.head.config, expected.head.fc
    shape = LayerKvShape(own.num_key_value_heads, own.head_dim, own.head_dim)
    return _PlannedHead(
        sum(_head_bytes(config, expected, base)),
        block_bytes(config, group, [[shape]], KvFormat(base.dtype)),
        (fc.in_features, fc.out_features),
        expected.head.lm_head.out_features,
        base,
    )


def _head_bytes(config: EngineConfig, expected: ExpectedHead, base: ExpectedBase) -> Iterator[int]:
    """As `PackedHead` holds it."""
    size, head = base.dtype.itemsize, expected.head
    if expected.has_embedding:
        yield base.vocab_size * head.config.hidden_size * size
    quantization = LoadQuantization(
        weight_format(config.quantization), config.quantization_group_size
    )
    for weights in ((head.fc.weight,), *head.sibling_weights):
        weight = torch.cat(weights).to(base.dtype)
        values = quantization.apply("", weight)
        kind = choose_linear(values, dtype=base.dtype, device_type=base.device_type)
        yield linear_bytes(values, kind, dtype=base.dtype, device_type=base.device_type)
    norms = (module for module in head.modules() if isinstance(module, nn.RMSNorm))
    yield sum(norm.weight.numel() for norm in norms) * size
