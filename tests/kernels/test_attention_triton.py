"""The Triton kernels of attention under the interpreter, against the plain op, amid NaN."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from loraplex.kernels.attention import AttentionBatch, AttentionOptions
from support.attention_cases import AttentionCase, Sequences

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"  # Triton 3.6's interpreter
)
MIXED = Sequences([(1, 1), (17, 1), (40, 1), (64, 1), (90, 3), (9, 9), (45, 20), (23, 23)])
DECODES = Sequences([(1, 1), (4, 1), (5, 1), (130, 1), (67, 1)])
TREE = Sequences([(40, 7), (12, 5), (30, 1), (9, 4)], [[-1, -1, 0, 0, 2], [-1, 0, 0]])
SCALE = 0.3
LOGITS = torch.randn(6, generator=torch.Generator().manual_seed(9))
OPTIONS = {
    "plain": AttentionOptions(SCALE),
    "window": AttentionOptions(SCALE, sliding_window=7),
    "long-window": AttentionOptions(SCALE, sliding_window=66),
    "window-sink-positions": AttentionOptions(SCALE, sliding_window=9, num_sink_positions=6),
    "softcap": AttentionOptions(SCALE, softcap=0.7),
    "sinks": AttentionOptions(SCALE, sinks=LOGITS),
    "all": AttentionOptions(SCALE, 20, 3, 2.0, LOGITS),
}


def attend(module: ModuleType, case: AttentionCase, batch: AttentionBatch | None = None) -> Tensor:
    batch = batch or case.batch(in_place=True)
    out = torch.empty(*case.q.shape[:2], case.sizes.value_dim, dtype=case.q.dtype)
    for group in batch.groups:
        module.attend_group(case.q, out, case.keys, case.values, group, case.options)
    return out


def assert_close(actual: Tensor, expected: Tensor, bound: float = 2e-6) -> None:
    assert (actual.float() - expected).abs().max() <= bound


@pytest.mark.parametrize("sequences", [MIXED, TREE], ids=["mixed", "tree"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_the_plain_op(
    interpreted_attention: ModuleType, options: AttentionOptions, sequences: Sequences
) -> None:
    case = AttentionCase(sequences, options)
    assert_close(attend(interpreted_attention, case), case.expected())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("sequences", [DECODES, TREE], ids=["decodes", "tree"])
def test_splits_are_put_together(
    interpreted_attention: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    options: AttentionOptions,
    sequences: Sequences,
) -> None:
    monkeypatch.setattr(interpreted_attention, "SPLIT_KEYS", 32)
    case = AttentionCase(sequences, options)
    assert_close(attend(interpreted_attention, case), case.expected())
