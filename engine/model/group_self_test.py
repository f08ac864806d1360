"""The self-test of a base that is divided among the ranks of a group.

Rank 0 computes what the whole base answers, and compares. The other ranks run the same forward
passes in the same order, because each exchanges results.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..kv.cache import KvFormat
from ..kv.groups import LayerKvShape
from ..shards.rank_sums import RankSums
from .admission import (
    DenseCase,
    SelfTest,
    check_parity,
    dense_reference,
    paged_error,
    run_paged,
    self_test_tokens,
)
from .expert_choices import choosing, of_first_rank


class References(NamedTuple):
    """What the whole base computes of the self-tests' sequences; none of them on the followers."""

    plain: list[DenseCase]
    of_kv: list[DenseCase]
    """Of the self-test of a quantized KV cache."""

    @classmethod
    def of(cls, model: PreTrainedModel, vocab_size: int, kv_test: SelfTest) -> References:
        plain = dense_reference(model, vocab_size)
        if kv_test == SelfTest():
            return cls(plain, plain)
        return cls(plain, dense_reference(model, vocab_size, kv_test.lengths))


def check_together(
    model: nn.Module,
    config: Any,
    shapes: list[LayerKvShape],
    cases: list[DenseCase],
    packed: Sequence[object],
    ranks: RankSums,
) -> float:
    """Run the self-test with all ranks; rank 0, which has the cases, compares. Returns its error.

    `packed`: this rank's packed layers. Raises UnsupportedModel as `check_parity`.
    """
    dtype = next(model.parameters()).dtype
    with _same_experts(model, dtype, ranks):
        if cases:
            return check_parity(model, shapes, cases, parts=packed)
        _run_along(model, config, shapes, KvFormat(dtype), SelfTest())
    return 0.0


def kv_error_together(
    model: nn.Module,
    config: Any,
    shapes: list[LayerKvShape],
    cases: list[DenseCase],
    kv_format: KvFormat,
    test: SelfTest,
) -> float:
    """The error of a quantized KV cache, on rank 0; 0.0 on the others, and without one."""
    if kv_format.code_dtype is None:
        return 0.0
    if cases:
        return paged_error(model, shapes, cases, kv_format, test.cuts)
    _run_along(model, config, shapes, kv_format, test)
    return 0.0


def _same_experts(
    model: nn.Module, dtype: torch.dtype, ranks: RankSums
) -> AbstractContextManager[None]:
    """In the half types `check_parity` replaces some choices of experts, which rank 0 alone knows:
    meanwhile all ranks compute rank 0's."""
    if dtype is torch.float32:
        return nullcontext()
    return choosing(model, of_first_rank(ranks))


def _run_along(
    model: nn.Module,
    config: Any,
    shapes: list[LayerKvShape],
    kv_format: KvFormat,
    test: SelfTest,
) -> None:
    """This rank's part of a self-test that rank 0 compares."""
    run_paged(
        model, shapes, self_test_tokens(config.vocab_size, test.lengths), kv_format, test.cuts
    )
