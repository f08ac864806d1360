"""The Triton kernel for pages of `kv_groups` in the interpreter, compared with the plain op.

Memory that was not written is NaN, and so is each form of a block that no query reads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from loraplex.kernels.attention import AttentionBatch, AttentionOptions, SequenceGroup
from loraplex.kernels.attention_window import AttentionWindow
from support.attention_cases import AttentionCase, Sequences, Sizes
from support.marks import marked_slow

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"  # Triton 3.6's interpreter
)
MIXED = Sequences([(33, 1), (64, 1), (66, 5), (45, 20)])
"""Decoding at both ends of a block, draft tokens in two blocks, and a prompt chunk in several."""
DECODES = Sequences([(1, 1), (16, 1), (70, 1), (37, 1)])
SCALE = 0.3
LOGITS = torch.randn(3, generator=torch.Generator().manual_seed(9))
SLOPES = 2.0 ** -torch.arange(1.0, 1 + len(LOGITS))
OPTIONS = {
    "plain": AttentionOptions(SCALE),
    "window": AttentionOptions(SCALE, window=AttentionWindow(7)),
    "window-sink-positions": AttentionOptions(
        SCALE, window=AttentionWindow(25), num_sink_positions=6
    ),
    "chunk": AttentionOptions(SCALE, window=AttentionWindow(7, is_chunked=True)),
    "long-chunk": AttentionOptions(SCALE, window=AttentionWindow(25, is_chunked=True)),
    "softcap": AttentionOptions(SCALE, softcap=0.7),
    "sinks": AttentionOptions(SCALE, sinks=LOGITS),
    "slopes": AttentionOptions(SCALE, slopes=SLOPES),
    "all": AttentionOptions(SCALE, AttentionWindow(20), 3, 2.0, LOGITS, SLOPES),
}
SMALL = Sizes(3, 1, 16, 16, block_size=16)
SIZES = {
    "blocks-of-8": Sizes(6, 2, 16, 16, block_size=8),
    "blocks-of-12": Sizes(2, 2, 16, 24, block_size=12),
    "heads-of-64": Sizes(5, 1, 64, 64, block_size=32),
    "heads-of-80": Sizes(2, 2, 80, 80, block_size=16),
    "heads-of-128": Sizes(4, 1, 128, 128, block_size=64),
    "heads-of-256": Sizes(2, 1, 256, 256, block_size=16),
}


def attend(module: ModuleType, case: AttentionCase, batch: AttentionBatch | None = None) -> Tensor:
    batch = batch or case.batch(in_place=True)
    out = torch.empty(*case.q.shape[:2], case.sizes.value_dim, dtype=case.q.dtype)
    for group in batch.groups:
        module.attend_group(case.q, out, case.keys, case.values, group, case.options)
    return out


def assert_close(actual: Tensor, expected: Tensor, bound: float = 4e-6) -> None:
    assert (actual.float() - expected).abs().max() <= bound


@pytest.mark.parametrize("bits", marked_slow([4, 2], slow={4}))
@pytest.mark.parametrize("name", marked_slow(OPTIONS, slow=OPTIONS.keys() - {"plain", "all"}))
def test_equals_the_plain_op(
    interpreted_attention_groups: ModuleType, name: str, bits: int
) -> None:
    case = AttentionCase(MIXED, OPTIONS[name], SMALL, bits=bits)
    assert_close(attend(interpreted_attention_groups, case), case.expected())


@pytest.mark.parametrize("size", marked_slow(SIZES, slow=SIZES.keys() - {"blocks-of-12"}))
def test_any_sizes_equal_the_plain_op(interpreted_attention_groups: ModuleType, size: str) -> None:
    sizes = SIZES[size]
    options = AttentionOptions(sizes.dim**-0.5, window=AttentionWindow(30))
    case = AttentionCase(MIXED, options, sizes, bits=4)
    assert_close(attend(interpreted_attention_groups, case), case.expected())


@pytest.mark.parametrize(
    "dtype", marked_slow([torch.float16, torch.bfloat16], slow={torch.float16}), ids=str
)
def test_any_dtype_equals_the_plain_op(
    interpreted_attention_groups: ModuleType, dtype: torch.dtype
) -> None:
    case = AttentionCase(MIXED, AttentionOptions(SCALE), SMALL, dtype=dtype, bits=4)
    # What a rounding of numbers, weights and results leaves; the interpreter cuts bf16 off.
    bound = {torch.float16: 8e-3, torch.bfloat16: 8e-2}[dtype]
    assert_close(attend(interpreted_attention_groups, case), case.expected(), bound)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "all"])
def test_splits_are_put_together(
    interpreted_attention_groups: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(interpreted_attention_groups, "SPLIT_KEYS", 32)
    case = AttentionCase(Sequences([*DECODES.lengths, (66, 3)]), OPTIONS[name], SMALL, bits=2)
    assert_close(attend(interpreted_attention_groups, case), case.expected())


def random_cases(count: int) -> Iterator[AttentionCase]:
    rng = random.Random(3)
    for _ in range(count):
        lengths = [
            (context, rng.randint(1, min(context, rng.choice([1, 6, 40]))))
            for context in (rng.randint(1, 150) for _ in range(rng.randint(1, 4)))
        ]
        kv_heads, shared = rng.choice([(1, 1), (2, 3), (1, 7)])
        window = rng.choice([None, AttentionWindow(rng.randint(1, 80), rng.random() < 0.5)])
        options = AttentionOptions(
            SCALE,
            window,
            rng.randint(0, 19) if window else 0,
            rng.choice([None, 1.5]),
            rng.choice([None, torch.randn(kv_heads * shared)]),
        )
        sizes = Sizes(kv_heads * shared, kv_heads, 16, rng.choice([16, 24]), rng.choice([8, 16]))
        yield AttentionCase(Sequences(lengths), options, sizes, bits=rng.choice([4, 2]))


@pytest.mark.slow
def test_whatever_comes_together_equals_the_plain_op(
    interpreted_attention_groups: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreted_attention_groups, "SPLIT_KEYS", 64)
    for case in random_cases(5):
        assert_close(attend(interpreted_attention_groups, case), case.expected())


@pytest.mark.slow
def test_padding_of_a_captured_step_reads_nothing_and_changes_no_bit(
    interpreted_attention_groups: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreted_attention_groups, "SPLIT_KEYS", 32)
    case = AttentionCase(DECODES, OPTIONS["plain"], SMALL, bits=4)
    (group,) = case.batch(in_place=True).groups
    exact = attend(interpreted_attention_groups, case)
    case.q = torch.cat([case.q, torch.full_like(case.q[:1], torch.nan)])
    more = (0, 12 - group.block_tables.shape[1], 0, 1)
    wide = replace(
        group,
        rows=torch.arange(5)[:, None],
        positions=torch.nn.functional.pad(group.positions, (0, 0, 0, 1), value=-1),
        block_tables=torch.nn.functional.pad(group.block_tables, more, value=1),
    )
    out = attend(interpreted_attention_groups, case, AttentionBatch(torch.empty(0), (wide,), ()))
    assert torch.equal(out[:4], exact)
    assert not out[4].any()


@pytest.mark.slow
def test_what_shares_the_batch_changes_no_bit(
    interpreted_attention_groups: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreted_attention_groups, "SPLIT_KEYS", 32)
    case = AttentionCase(DECODES, OPTIONS["plain"], SMALL, bits=4)
    together = attend(interpreted_attention_groups, case)
    (group,) = case.batch(in_place=True).groups
    for index, (context, _) in enumerate(DECODES.lengths):
        alone = SequenceGroup(
            group.rows[index, None],
            group.positions[index, None],
            group.block_tables[index, None, : -(-context // 16)],
        )
        batch = AttentionBatch(torch.empty(0), (alone,), ())
        out = attend(interpreted_attention_groups, case, batch)
        assert torch.equal(out[index], together[index])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_step_that_is_not_finite_stays_in_its_sequence(
    interpreted_attention_groups: ModuleType,
) -> None:
    case = AttentionCase(DECODES, OPTIONS["plain"], SMALL, bits=4)
    assert case.values.scales is not None
    case.values.scales[case.chunks[2].tables[0][1], 0, 2] = torch.nan
    out = attend(interpreted_attention_groups, case)
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()


def test_a_tree_is_refused(interpreted_attention_groups: ModuleType) -> None:
    tree = Sequences([(40, 5)], [[-1, -1, 0, 0]])
    with pytest.raises(AssertionError, match="tree"):
        attend(interpreted_attention_groups, AttentionCase(tree, None, SMALL, bits=4))
