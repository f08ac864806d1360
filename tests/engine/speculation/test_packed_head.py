"""The head as it is served: what `EagleHead` computes, in one call and in many."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from loraplex.engine.kv.cache import KvCache, KvFormat
from loraplex.engine.kv.groups import LayerKvShape, one_group
from loraplex.engine.model.load_quantization import LoadQuantization
from loraplex.engine.speculation.chain_inputs import ChainInputs
from loraplex.engine.speculation.draft_head import Pages, Rotation
from loraplex.engine.speculation.eagle_head import EagleHead
from loraplex.engine.speculation.packed_head import PackedHead
from loraplex.kernels.cpu_library import cpu_library
from loraplex.kernels.int8_linear import Int8Linear
from loraplex.kernels.quantize import WeightFormat
from support.eagle import DenseEagle, make_head

SIZE, VOCAB, BLOCK = 64, 260, 16
COUNTS = (1, 7, 40)
"""Known pairs of three chains; the last one needs several blocks."""
NUM_PASSES = 4


class Chains(NamedTuple):
    tokens: list[list[int]]
    features: list[Tensor]
    inputs: ChainInputs
    pages: Pages


def make_chains() -> Chains:
    generator = torch.Generator().manual_seed(5)
    shape = LayerKvShape(num_heads=2, key_dim=16, value_dim=16)
    cache = KvCache(
        one_group(1, 32),
        [shape],
        block_size=BLOCK,
        kv_format=KvFormat(torch.float32),
        device=torch.device("cpu"),
    )
    tables = [torch.arange(1 + 8 * index, 5 + 8 * index).numpy() for index in range(len(COUNTS))]
    inputs = ChainInputs(
        [0] * len(COUNTS),
        COUNTS,
        tables,
        NUM_PASSES,
        block_size=BLOCK,
        device=torch.device("cpu"),
    )
    tokens = [
        torch.randint(VOCAB, (count + NUM_PASSES - 1,), generator=generator).tolist()
        for count in COUNTS
    ]
    features = [torch.randn(count, SIZE, generator=generator) for count in COUNTS]
    return Chains(tokens, features, inputs, (cache.keys[0], cache.values[0]))


def run_passes(packed: PackedHead, embedding: Tensor, *, plainly: bool) -> list[Tensor]:
    """Of each pass the hidden states of the last pairs, and their logits."""
    tokens, known, inputs, pages = make_chains()
    run = packed.run_plainly if plainly else packed.run
    cos, sin = packed.rotation(inputs.positions)
    features, results = torch.cat(known), []
    for index in range(NUM_PASSES):
        own = inputs.rows(index)
        ids = [
            token
            for of_chain, count in zip(tokens, COUNTS, strict=True)
            for token in (
                of_chain[:count] if index == 0 else of_chain[count + index - 1 : count + index]
            )
        ]
        features, logits = run(
            embedding[ids],
            features,
            Rotation(cos[own], sin[own]),
            inputs.last_rows(index),
            pages,
            inputs.attention(index),
        )
        results += [features, logits]
    return results


def expected(head: EagleHead, embedding: Tensor, *, norm_before_residual: bool) -> list[Tensor]:
    """The same by the reference, chain after chain."""
    tokens, features, _, _ = make_chains()
    by_pass: list[list[list[Tensor]]] = [[[], []] for _ in range(NUM_PASSES)]
    for of_chain, known, count in zip(tokens, features, COUNTS, strict=True):
        dense = DenseEagle(head, embedding, norm_before_residual=norm_before_residual)
        state = torch.empty(0)
        for place, token in enumerate(of_chain):
            state = dense.state(token, known[place].double() if place < count else state)
            if place >= count - 1:
                states, logits = by_pass[place - count + 1]
                states.append(state)
                logits.append(dense.logits(state)[head.token_ids])
    return [torch.stack(part) for parts in by_pass for part in parts]


def embedding_of(generator_seed: int = 1) -> Tensor:
    return torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(generator_seed))


@pytest.mark.parametrize("plainly", [False, True])
@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("is_bfloat16", [False, True])
def test_passes_compute_what_the_reference_does(
    plainly: bool, norm_before_residual: bool, is_bfloat16: bool
) -> None:
    head = make_head(draft_vocab_size=90, norm_before_residual=norm_before_residual)
    if is_bfloat16:  # such weights are kept in half the memory
        for parameter in head.parameters():
            parameter.copy_(parameter.bfloat16())
    packed = PackedHead(head, LoadQuantization())
    actual = run_passes(packed, embedding_of(), plainly=plainly)
    wanted = expected(head, embedding_of(), norm_before_residual=norm_before_residual)
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("group_size", [None, 32])
def test_a_head_is_quantized_like_its_base(group_size: int | None) -> None:
    """The rounding of its weights changes little, and both ways to compute it agree."""
    head = make_head(draft_vocab_size=90)
    packed = PackedHead(head, LoadQuantization(WeightFormat.INT8, group_size))
    assert packed.weight_bytes < 0.4 * PackedHead(head, LoadQuantization()).weight_bytes
    fast, plain = (run_passes(packed, embedding_of(), plainly=way) for way in (False, True))
    wanted = expected(head, embedding_of(), norm_before_residual=False)
    # Where the processor multiplies bytes, each layer's inputs are rounded to bytes as well.
    rounds_inputs = any(isinstance(linear, Int8Linear) for linear in packed.linears)
    bound = 0.2 if rounds_inputs else 0.1
    for one, other, exact in zip(fast, plain, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
        assert (one - exact).norm() < bound * exact.norm()


@pytest.mark.skipif(cpu_library().functions is None, reason="needs a C++ compiler: g++")
def test_the_library_computes_a_head_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = PackedHead(make_head(), LoadQuantization())
    monkeypatch.setattr(packed, "run_plainly", None)
    assert len(run_passes(packed, embedding_of(), plainly=False)) == 2 * NUM_PASSES


def test_logits_of_drafted_tokens_are_spread_over_the_vocabulary() -> None:
    packed = PackedHead(make_head(draft_vocab_size=90), LoadQuantization())
    whole = packed.whole_logits(torch.ones(2, 90))
    assert whole.shape == (2, VOCAB)
    assert (whole == 1).nonzero()[:, 1].tolist() == [*range(0, 180, 2)] * 2
    assert whole.min() < -1e8
