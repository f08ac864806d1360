"""The Triton attention kernels in the interpreter, compared with the reference, with NaN around."""

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
from support.attention_cases import AttentionCase, Sequences, Sizes, pages_apart
from support.marks import marked_slow

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"  # Triton 3.6's interpreter
)
MIXED = Sequences([(1, 1), (17, 1), (64, 1), (90, 3), (9, 9), (45, 20), (23, 23)])
DECODES = Sequences([(1, 1), (4, 1), (5, 1), (70, 1), (37, 1)])
CHUNKS = Sequences([(100, 40), (64, 32), (65, 32), (33, 33), (150, 20)])
"""Prompt chunks after whole tiles of keys that all of their tokens see."""
TREE = Sequences([(40, 7), (12, 5), (30, 1), (9, 4)], [[-1, -1, 0, 0, 2], [-1, 0, 0]])
SCALE = 0.3
LOGITS = torch.randn(6, generator=torch.Generator().manual_seed(9))
PLAIN = AttentionOptions(SCALE)
SLOPES = 2.0 ** -torch.arange(1.0, 7.0)
OPTIONS = {
    "plain": PLAIN,
    "window": AttentionOptions(SCALE, window=AttentionWindow(7)),
    "window-sink-positions": AttentionOptions(
        SCALE, window=AttentionWindow(50), num_sink_positions=6
    ),
    "chunk": AttentionOptions(SCALE, window=AttentionWindow(7, is_chunked=True)),
    "long-chunk": AttentionOptions(SCALE, window=AttentionWindow(50, is_chunked=True)),
    "softcap": AttentionOptions(SCALE, softcap=0.7),
    "sinks": AttentionOptions(SCALE, sinks=LOGITS),
    "slopes": AttentionOptions(SCALE, slopes=SLOPES),
    "all": AttentionOptions(SCALE, AttentionWindow(20), 3, 2.0, LOGITS, SLOPES),
}
SIZES = {
    "one-head-each": Sizes(3, 3, 16, 16),
    "one-head-for-all": Sizes(5, 1, 16, 16),
    "dims-no-power-of-two": Sizes(6, 2, 40, 24),
    "wide": Sizes(2, 1, 192, 136),
    "blocks-of-three": Sizes(6, 2, 16, 16, block_size=3),
    "blocks-of-16": Sizes(6, 2, 8, 5, block_size=16),
    "latent": Sizes(5, 1, 24, 16, is_latent=True),
}
LATENT = SIZES["latent"]


def attend(module: ModuleType, case: AttentionCase, batch: AttentionBatch | None = None) -> Tensor:
    batch = batch or case.batch(in_place=True)
    out = torch.empty(*case.q.shape[:2], case.sizes.value_dim, dtype=case.q.dtype)
    for group in batch.groups:
        module.attend_group(case.q, out, case.keys, case.values, group, case.options)
    return out


LIKE_OTHER_SIZES = {"one-head-for-all", "one-head-each", "blocks-of-16", "wide"}


def assert_close(actual: Tensor, expected: Tensor, bound: float = 2e-6) -> None:
    assert (actual.float() - expected).abs().max() <= bound


@pytest.mark.parametrize("name", marked_slow(OPTIONS, slow={"window", "window-sink-positions"}))
def test_equals_the_plain_op(interpreted_attention: ModuleType, name: str) -> None:
    case = AttentionCase(MIXED, OPTIONS[name])
    assert_close(attend(interpreted_attention, case), case.expected())


@pytest.mark.parametrize(
    "name", marked_slow(["plain", "softcap", "sinks"], slow={"softcap", "sinks"})
)
def test_chunks_equal_the_plain_op(interpreted_attention: ModuleType, name: str) -> None:
    case = AttentionCase(CHUNKS, OPTIONS[name])
    assert_close(attend(interpreted_attention, case), case.expected())


@pytest.mark.parametrize("name", marked_slow(OPTIONS, slow=OPTIONS.keys() - {"plain", "all"}))
def test_trees_equal_the_plain_op(interpreted_attention: ModuleType, name: str) -> None:
    case = AttentionCase(TREE, OPTIONS[name])
    assert_close(attend(interpreted_attention, case), case.expected())


@pytest.mark.parametrize("sequences", [DECODES, TREE], ids=["decodes", "tree"])
@pytest.mark.parametrize(
    "name", marked_slow(["plain", "window-sink-positions", "all"], slow={"window-sink-positions"})
)
def test_splits_are_put_together(
    interpreted_attention: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    sequences: Sequences,
) -> None:
    monkeypatch.setattr(interpreted_attention, "SPLIT_KEYS", 32)
    case = AttentionCase(sequences, OPTIONS[name])
    assert_close(attend(interpreted_attention, case), case.expected())


@pytest.mark.parametrize("name", marked_slow(SIZES, slow=LIKE_OTHER_SIZES))
def test_any_sizes_equal_the_plain_op(interpreted_attention: ModuleType, name: str) -> None:
    sizes = SIZES[name]
    options = AttentionOptions(sizes.dim**-0.5, window=AttentionWindow(30))
    case = AttentionCase(MIXED, options, sizes)
    assert_close(attend(interpreted_attention, case), case.expected())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("code_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_any_form_of_pages_equals_the_plain_op(
    interpreted_attention: ModuleType, dtype: torch.dtype, code_dtype: torch.dtype | None
) -> None:
    case = AttentionCase(MIXED, PLAIN, dtype=dtype, code_dtype=code_dtype)
    # What a rounding of weights, values and results leaves; the interpreter cuts bf16 off.
    bound = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 6e-2}[dtype]
    assert_close(attend(interpreted_attention, case), case.expected(), bound)


@pytest.mark.parametrize(
    ("code_dtype", "size", "others"),
    [
        (torch.int8, 1e-4, 1e-4),
        (torch.int8, 1e-4, 1.0),
        (torch.int8, 0.003, 300.0),
        (torch.float8_e4m3fn, 1e-4, 1.0),
    ],
    ids=str,
)
def test_values_of_any_size_keep_their_precision_in_fp16_beside_a_dominant_key(
    interpreted_attention: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    code_dtype: torch.dtype,
    size: float,
    others: float,
) -> None:
    monkeypatch.setattr(interpreted_attention, "SPLIT_KEYS", 128)
    sequences = Sequences([(300, 1), (70, 9)])
    case = AttentionCase(sequences, PLAIN, dtype=torch.float16, code_dtype=code_dtype)
    case.dominate(size=size, others=others)
    expected = case.expected()
    error = (attend(interpreted_attention, case).float() - expected).abs().amax(-1)
    assert (error / expected.abs().amax(-1)).max() < 1e-3


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_scale_that_is_not_finite_stays_in_its_sequence(
    interpreted_attention: ModuleType,
) -> None:
    decodes = Sequences([(5, 1), (9, 1)])
    case = AttentionCase(decodes, PLAIN, dtype=torch.float16, code_dtype=torch.int8)
    assert case.values.scales is not None
    case.values.scales[case.chunks[1].tables[0][1], 2] = torch.nan
    out = attend(interpreted_attention, case)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


def test_values_of_zero_give_zero_in_fp16(interpreted_attention: ModuleType) -> None:
    one = Sequences([(9, 1)])
    case = AttentionCase(one, PLAIN, dtype=torch.float16, code_dtype=torch.int8)
    case.dominate(size=0.0, others=0.0)
    assert not attend(interpreted_attention, case).any()


def random_cases(count: int) -> Iterator[AttentionCase]:
    rng = random.Random(3)
    for _ in range(count):
        lengths = [
            (context, rng.randint(1, min(context, rng.choice([1, 6, 40]))))
            for context in (rng.randint(1, 150) for _ in range(rng.randint(1, 4)))
        ]
        trees = [
            [rng.randint(-1, index - 1) for index in range(num_new - 1)]
            if 1 < num_new <= 8 and rng.random() < 0.5
            else None
            for _, num_new in lengths
        ]
        kv_heads, shared = rng.choice([(1, 1), (2, 3), (1, 7)])
        window = rng.choice([None, AttentionWindow(rng.randint(1, 80), rng.random() < 0.5)])
        options = AttentionOptions(
            SCALE,
            window,
            rng.randint(0, 9) if window else 0,
            rng.choice([None, 1.5]),
            rng.choice([None, torch.randn(kv_heads * shared)]),
        )
        sizes = Sizes(kv_heads * shared, kv_heads, 16, rng.choice([16, 5]), rng.choice([4, 5, 16]))
        yield AttentionCase(Sequences(lengths, trees), options, sizes)


def test_whatever_comes_together_equals_the_plain_op(
    interpreted_attention: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreted_attention, "SPLIT_KEYS", 64)
    for case in random_cases(8):
        assert_close(attend(interpreted_attention, case), case.expected())


def widened(group: SequenceGroup, num_blocks: int, num_sequences: int) -> SequenceGroup:
    """As a captured step has it: padded to a capacity, with what an earlier step left there."""
    more = (0, num_blocks - group.block_tables.shape[1], 0, num_sequences - len(group.rows))
    rows = torch.arange(num_sequences)[:, None]
    positions = torch.nn.functional.pad(group.positions, (0, 0, 0, more[3]), value=-1)
    tables = torch.nn.functional.pad(group.block_tables, more, value=1)
    return replace(group, rows=rows, positions=positions, block_tables=tables)


def test_padding_of_a_captured_step_reads_nothing_and_changes_no_bit(
    interpreted_attention: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreted_attention, "SPLIT_KEYS", 32)
    case = AttentionCase(DECODES, PLAIN)
    (group,) = case.batch(in_place=True).groups
    exact = attend(interpreted_attention, case)
    case.q = torch.cat([case.q, torch.full_like(case.q[:1], torch.nan)])
    padded = AttentionBatch(torch.empty(0), (widened(group, 48, 6),), ())
    out = attend(interpreted_attention, case, padded)
    assert torch.equal(out[:5], exact)
    assert torch.equal(out[5:], torch.zeros_like(out[5:]))


@pytest.mark.parametrize("name", marked_slow(OPTIONS, slow=OPTIONS.keys() - {"all"}))
def test_rows_of_a_captured_step_see_their_own_branches(
    interpreted_attention: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(interpreted_attention, "SPLIT_KEYS", 32)
    few = Sequences([(36, 5), (5, 1)], [[-1, -1, 0, 2]])
    case = AttentionCase(few, OPTIONS[name], Sizes(6, 1))
    expected, num_tokens = case.expected(), len(case.q)
    batch = case.captured(num_tokens + 1)
    case.q = torch.cat([case.q, torch.full_like(case.q[:1], torch.nan)])
    out = attend(interpreted_attention, case, batch)
    assert_close(out[:num_tokens], expected)


def test_plain_rows_have_the_same_bits_where_trees_may_be_verified(
    interpreted_attention: ModuleType,
) -> None:
    case = AttentionCase(DECODES, PLAIN, dtype=torch.float16)
    plain = attend(interpreted_attention, case)
    batch = case.captured(len(case.q))
    assert batch.groups[0].hidden is not None
    assert torch.equal(attend(interpreted_attention, case, batch), plain)


def test_what_shares_the_batch_changes_no_bit(
    interpreted_attention: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreted_attention, "SPLIT_KEYS", 32)
    case = AttentionCase(DECODES, PLAIN)
    together = attend(interpreted_attention, case)
    (group,) = case.batch(in_place=True).groups
    for index, (context, _) in enumerate(DECODES.lengths):
        num_blocks = -(-context // case.sizes.block_size)
        alone = SequenceGroup(
            group.rows[index, None],
            group.positions[index, None],
            group.block_tables[index, None, :num_blocks],
        )
        out = attend(interpreted_attention, case, AttentionBatch(torch.empty(0), (alone,), ()))
        assert torch.equal(out[index], together[index])


@pytest.mark.parametrize(
    ("name", "code_dtype"), [("one-head-each", torch.int8), ("latent", None)], ids=str
)
def test_blocks_that_lie_far_apart_change_no_bit(
    interpreted_attention: ModuleType, name: str, code_dtype: torch.dtype | None
) -> None:
    """The last blocks' elements have numbers beyond 32 bits."""
    case = AttentionCase(Sequences([(21, 1), (9, 2)]), PLAIN, SIZES[name], code_dtype=code_dtype)
    expected, batch = attend(interpreted_attention, case), case.batch(in_place=True)
    num_before = 1030 if code_dtype else 0
    case.keys, case.values = pages_apart(
        case.keys, case.values, dtype=case.q.dtype, num_before=num_before
    )
    groups = [
        replace(group, block_tables=group.block_tables + num_before) for group in batch.groups
    ]
    actual = attend(interpreted_attention, case, replace(batch, groups=tuple(groups)))
    assert torch.equal(actual, expected)


def test_queries_may_lie_anyhow_but_for_their_last_axis(interpreted_attention: ModuleType) -> None:
    case = AttentionCase(DECODES, PLAIN)
    expected = attend(interpreted_attention, case)
    case.q = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(attend(interpreted_attention, case), expected)


def test_a_value_that_is_not_finite_stays_in_its_sequence(
    interpreted_attention: ModuleType,
) -> None:
    case = AttentionCase(DECODES, PLAIN)
    table = case.chunks[3].tables[0]
    case.values.data[table[5], 2] = torch.nan
    out = attend(interpreted_attention, case)
    assert out[3].isnan().all()
    assert out[[0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("code_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("sequences", [MIXED, TREE], ids=["mixed", "tree"])
def test_values_may_be_a_part_of_keys(
    interpreted_attention: ModuleType, sequences: Sequences, code_dtype: torch.dtype | None
) -> None:
    case = AttentionCase(sequences, PLAIN, LATENT, code_dtype=code_dtype)
    assert_close(attend(interpreted_attention, case), case.expected(), 4e-6)


def test_many_heads_that_share_values_are_split_too(
    interpreted_attention: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreted_attention, "SPLIT_KEYS", 32)
    sizes = Sizes(40, 1, 24, 16, is_latent=True)
    case = AttentionCase(DECODES, AttentionOptions(SCALE), sizes)
    assert_close(attend(interpreted_attention, case), case.expected())
