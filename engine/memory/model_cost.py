"""The cost of a base per step: bytes read and operations of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model.base_model import BaseModel
from .utilization import KvReads, ModelCost

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The names of this setting in configurations."""


def model_cost(base: BaseModel, kv_reads: tuple[KvReads, ...]) -> ModelCost:
    num_experts = _num_experts(base.config)
    shared: list[Tensor] = []
    experts: list[Tensor] = []
    for weight in _weights_read_whole(base.model):
        is_expert = weight.ndim == 3 and weight.shape[0] == num_experts
        (experts if is_expert else shared).append(weight)
    linears = [fused.linear for fused in base.projections]
    head = base.packed_ends.head
    read = linears if head is None else [*linears, head]
    return ModelCost(
        shared_bytes=sum(weight.nbytes for weight in shared)
        + sum(linear.weight_bytes for linear in read),
        shared_parameters=sum(linear.in_features * linear.out_features for linear in linears),
        head_parameters=_num_head_parameters(base.model),
        kv_reads=kv_reads,
        expert_bytes=sum(weight.nbytes for weight in experts)
        + sum(packed.weight_bytes for packed in base.packed_experts),
        expert_parameters=sum(weight.numel() for weight in experts)
        + sum(prod(packed.shape) for packed in base.packed_experts),
        expert_share=base.config.num_experts_per_tok / num_experts if num_experts else 0.0,
    )


def _weights_read_whole(model: PreTrainedModel) -> Iterator[Tensor]:
    """All weights except tables of which a step reads a few rows; a tied table is the output head
    too."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    tables = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is not head
    }
    for parameter in model.parameters():
        if id(parameter) not in tables:
            yield parameter


def _num_head_parameters(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()
    return int(head.in_features) * int(head.out_features)


def _num_experts(config: Any) -> int:
    return next((found for name in _NUM_EXPERTS if (found := getattr(config, name, None))), 0)
