"""The CPU library's attention, compared with the plain op, with NaN around what was written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loraplex.engine.model.inputs import DecodeChunks
from loraplex.kernels import attention_cpu, cpu_library
from loraplex.kernels.attention import (
    AttentionBatch,
    AttentionOptions,
    SequenceGroup,
    attend_gathered,
    paged_attention,
)
from loraplex.kernels.attention_groups import by_block
from loraplex.kernels.attention_window import AttentionWindow
from loraplex.kernels.kv_groups import GroupedPages
from support.attention_cases import AttentionCase, Sequences, Sizes
from support.cpu_kernels import needs_cpu_library

pytestmark = needs_cpu_library
needs_prompts = pytest.mark.skipif(
    cpu_library.function("attend_prompts", torch.bfloat16) is None,
    reason="the processor has no products of pairs of bf16",
)
DECODES = Sequences([(1, 1), (16, 1), (17, 1), (70, 1), (37, 1)])
VERIFIED = Sequences([(64, 1), (90, 3), (9, 5), (45, 8), (23, 2), (7, 7)])
TREES = Sequences(
    [(64, 1), (90, 8), (33, 5), (17, 4), (45, 8), (7, 7)],
    [None, [-1, -1, 0, 1, 1, 3, 0], [-1, -1, 1, -1], [-1, -1, 1], None, [-1, -1, 0, 0, 2]],
)
"""At the edge of a block too, beside sequences without branches."""
NEW_TOKENS = {"decodes": DECODES, "verified": VERIFIED, "trees": TREES}
PROMPTS = Sequences([(300, 270), (64, 64), (37, 1), (81, 17), (190, 60), (70, 5)])
"""Some of whole tiles, some not, beside sequences that decode."""
SCALE = 0.3
LOGITS = torch.randn(6, generator=torch.Generator().manual_seed(9))
SLOPES = 2.0 ** -torch.arange(1.0, 7.0)
OPTIONS = {
    "plain": AttentionOptions(SCALE),
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
    "plain": Sizes(6, 2, 16, 16, block_size=16),
    "one-head-each": Sizes(3, 3, 64, 64, block_size=16),
    "one-head-for-all": Sizes(5, 1, 80, 48, block_size=16),
    "eight-heads-for-one": Sizes(8, 1, 32, 80, block_size=16),
    "wide": Sizes(2, 1, 192, 128, block_size=32),
    "many-heads": Sizes(160, 2, 16, 32, block_size=64),
    "latent": Sizes(20, 1, 48, 32, block_size=16, is_latent=True),
    "latent-of-many-heads": Sizes(132, 1, 80, 64, block_size=16, is_latent=True),
}
SIX_HEADS = SIZES["plain"]


GROUPED_SIZES = {
    "plain": SIX_HEADS,
    "groups-of-two": Sizes(4, 2, 64, 128, block_size=64),
    "one-head-for-all": Sizes(5, 1, 80, 48, block_size=16),
    "many-heads": Sizes(160, 2, 16, 32, block_size=32),
}


def attend_group(case: AttentionCase, group: SequenceGroup, out: Tensor) -> bool:
    name = "attend_groups" if isinstance(case.keys, GroupedPages) else "attend"
    function = cpu_library.function(name, case.q.dtype)
    assert function is not None
    return attention_cpu.attend_group(
        function, case.q, out, case.keys, case.values, group, case.options
    )


def cut(case: AttentionCase) -> AttentionBatch:
    """The step, with tables that name open blocks where pages have them."""
    batch = case.batch(in_place=False)
    if isinstance(case.keys, GroupedPages):
        return by_block(batch, case.keys.blocks, case.sizes.block_size)
    return batch


def attend(case: AttentionCase) -> Tensor:
    batch = cut(case)
    assert not batch.chunks, "they are PyTorch's"
    out = torch.empty(*case.q.shape[:2], case.sizes.value_dim, dtype=case.q.dtype)
    for group in batch.groups:
        assert attend_group(case, group, out)
    return out


@pytest.mark.parametrize("sequences", NEW_TOKENS.values(), ids=NEW_TOKENS)
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_plain_op(name: str, sequences: Sequences) -> None:
    case = AttentionCase(sequences, OPTIONS[name], SIX_HEADS)
    assert (attend(case) - case.expected()).abs().max() <= 2e-6


@pytest.mark.parametrize("sequences", NEW_TOKENS.values(), ids=NEW_TOKENS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_serves_heads_and_blocks_of_any_number_and_size(sizes: Sizes, sequences: Sequences) -> None:
    case = AttentionCase(sequences, sizes=sizes)
    ours = attend(case)
    assert (ours - case.expected()).abs().max() <= 2e-6
    torch.set_num_threads(2)
    assert torch.equal(attend(case), ours)


def is_as_exact_as_bf16(ours: Tensor, case: AttentionCase) -> bool:
    """Within the rounding of the weights and of the result."""
    expected = case.expected()
    return bool((ours.float() - expected).abs().max() <= 2.0**-7 * expected.abs().max())


@pytest.mark.parametrize("sequences", NEW_TOKENS.values(), ids=NEW_TOKENS)
@pytest.mark.parametrize("name", OPTIONS)
def test_bf16_is_as_exact_as_its_elements(name: str, sequences: Sequences) -> None:
    case = AttentionCase(sequences, OPTIONS[name], SIX_HEADS, dtype=torch.bfloat16)
    assert is_as_exact_as_bf16(attend(case), case)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_bf16_heads_and_blocks_may_have_any_number_and_size(sizes: Sizes) -> None:
    case = AttentionCase(VERIFIED, sizes=sizes, dtype=torch.bfloat16)
    ours = attend(case)
    assert is_as_exact_as_bf16(ours, case)
    torch.set_num_threads(2)
    assert torch.equal(attend(case), ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_a_tree_s_tokens_have_the_bits_that_each_has_in_a_row_of_its_own(
    name: str, dtype: torch.dtype
) -> None:
    case = AttentionCase(TREES, OPTIONS[name], SIX_HEADS, dtype=dtype)
    out = torch.empty_like(case.q)
    (group,) = case.captured(len(case.q)).groups
    assert attend_group(case, group, out)
    assert torch.equal(out, attend(case))


def attend_step(case: AttentionCase) -> Tensor:
    return paged_attention(case.q, case.keys, case.values, case.batch(in_place=False), case.options)


@needs_prompts
@pytest.mark.parametrize("name", OPTIONS)
def test_a_bf16_prompt_is_as_exact_as_its_elements(name: str) -> None:
    case = AttentionCase(PROMPTS, OPTIONS[name], SIX_HEADS, dtype=torch.bfloat16)
    assert case.batch(in_place=False).chunks
    assert is_as_exact_as_bf16(attend_step(case), case)


@needs_prompts
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_bf16_prompts_may_have_heads_and_blocks_of_any_number_and_size(sizes: Sizes) -> None:
    case = AttentionCase(PROMPTS, sizes=sizes, dtype=torch.bfloat16)
    ours = attend_step(case)
    assert is_as_exact_as_bf16(ours, case)
    torch.set_num_threads(2)
    assert torch.equal(attend_step(case), ours)


@needs_prompts
@pytest.mark.parametrize("name", OPTIONS)
def test_a_bf16_prompt_s_tokens_have_the_bits_that_each_has_alone(name: str) -> None:
    """Alone, a token's block table omits more of what its window omits."""
    case = AttentionCase(PROMPTS, OPTIONS[name], SIX_HEADS, dtype=torch.bfloat16)
    together = attend_step(case)
    case.chunks = list(DecodeChunks.of(case.chunks))
    assert not case.batch(in_place=False).chunks
    assert torch.equal(attend_step(case), together)


def test_a_bf16_prompt_over_codes_is_pytorch_s() -> None:
    case = AttentionCase(PROMPTS, sizes=SIX_HEADS, dtype=torch.bfloat16, code_dtype=torch.int8)
    assert case.keys.scales is not None
    assert case.values.scales is not None
    for scales in (case.keys.scales, case.values.scales):
        scales.nan_to_num_(0.0)
    batch = case.batch(in_place=False)
    plain = attend_gathered(case.q, case.keys, case.values, batch, case.options)
    assert torch.equal(attend_step(case), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_s_bits_do_not_depend_on_those_computed_with_it(dtype: torch.dtype) -> None:
    sequences = Sequences([(75, 6), (40, 1), (33, 3)])
    together = AttentionCase(sequences, sizes=SIX_HEADS, dtype=dtype)
    expected = attend(together)
    (group,) = (g for g in together.batch(in_place=False).groups if len(g.rows[0]) > 4)
    for row in range(6):
        lone = type(group)(
            group.rows[:, row : row + 1].contiguous(),
            group.positions[:, row : row + 1].contiguous(),
            group.block_tables,
        )
        out = torch.zeros_like(expected)
        assert attend_group(together, lone, out)
        assert torch.equal(out[row], expected[row])


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("sequences", [DECODES, VERIFIED], ids=["decodes", "verified"])
@pytest.mark.parametrize("name", OPTIONS)
def test_blocks_of_codes_equal_the_plain_op(name: str, sequences: Sequences, bits: int) -> None:
    case = AttentionCase(sequences, OPTIONS[name], SIX_HEADS, bits=bits)
    assert (attend(case) - case.expected()).abs().max() <= 4e-6


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("sizes", GROUPED_SIZES.values(), ids=GROUPED_SIZES)
def test_blocks_of_codes_may_have_any_number_and_size(sizes: Sizes, bits: int) -> None:
    case = AttentionCase(VERIFIED, sizes=sizes, bits=bits)
    ours = attend(case)
    assert (ours - case.expected()).abs().max() <= 4e-6
    torch.set_num_threads(2)
    assert torch.equal(attend(case), ours)


def test_blocks_of_codes_of_bf16_are_as_exact_as_its_elements() -> None:
    case = AttentionCase(VERIFIED, sizes=SIX_HEADS, dtype=torch.bfloat16, bits=4)
    expected = case.expected()
    assert (attend(case).float() - expected).abs().max() <= 2.0**-7 * expected.abs().max()


def test_a_token_s_bits_over_codes_do_not_depend_on_those_computed_with_it() -> None:
    """The tokens lie in two blocks."""
    case = AttentionCase(Sequences([(83, 6), (40, 1), (33, 3)]), sizes=SIX_HEADS, bits=4)
    assert isinstance(case.keys, GroupedPages)
    expected = attend(case)
    whole = case.batch(in_place=False)
    (group,) = (g for g in whole.groups if len(g.rows[0]) > 4)
    for row in range(6):
        lone = SequenceGroup(
            group.rows[:, row : row + 1], group.positions[:, row : row + 1], group.block_tables
        )
        batch = replace(whole, groups=(lone,))
        (part,) = by_block(batch, case.keys.blocks, case.sizes.block_size).groups
        out = torch.zeros_like(expected)
        assert attend_group(case, part, out)
        assert torch.equal(out[row], expected[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_that_is_not_finite_changes_no_other(dtype: torch.dtype) -> None:
    case = AttentionCase(DECODES, sizes=SIX_HEADS, dtype=dtype)
    expected = attend(case)
    block = case.chunks[3].tables[0].tolist()[1]
    case.keys.data[block, 2, 0, 5] = torch.inf
    case.values.data[block, 3, 1, 5] = torch.nan
    ours = attend(case)
    assert not ours[3].isfinite().all()
    others = [0, 1, 2, 4]
    assert torch.equal(ours[others], expected[others])


def test_large_scores_overflow_in_no_exponential() -> None:
    case = AttentionCase(DECODES, AttentionOptions(scale=100.0), SIX_HEADS)
    assert (attend(case) - case.expected()).abs().max() <= 1e-4
    case = AttentionCase(DECODES, AttentionOptions(scale=100.0), SIX_HEADS, dtype=torch.bfloat16)
    assert is_as_exact_as_bf16(attend(case), case)


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(DECODES, sizes=SIX_HEADS, code_dtype=torch.int8),
        AttentionCase(DECODES, sizes=Sizes(6, 2, 16, 80, block_size=16), bits=4),
        AttentionCase(DECODES, sizes=Sizes(6, 2, 24, 16, block_size=16)),
        AttentionCase(DECODES, sizes=Sizes(6, 2, 16, 8, block_size=16)),
        AttentionCase(DECODES, sizes=Sizes(6, 2, 16, 16, block_size=4)),
    ],
    ids=["codes", "groups of 40", "dim", "value dim", "block size"],
)
def test_what_is_not_served_is_left_alone(case: AttentionCase) -> None:
    out = torch.zeros(*case.q.shape[:2], case.sizes.value_dim, dtype=case.q.dtype)
    (group, *_) = cut(case).groups
    assert not attend_group(case, group, out)
    assert not out.any()
