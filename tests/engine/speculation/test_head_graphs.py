"""Passes of several heads as graphs that share their inputs, without a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from loraplex.engine.config import EngineConfig
from loraplex.engine.execution.decode_inputs import DecodeLayout
from loraplex.engine.kv.cache import KvCache, KvFormat
from loraplex.engine.kv.groups import one_group
from loraplex.engine.kv.sequence_blocks import block_table
from loraplex.engine.model.inputs import SequenceChunk
from loraplex.engine.model.load_quantization import LoadQuantization
from loraplex.engine.speculation.head_graphs import HeadGraphs, head_graph_bytes, head_sizes
from loraplex.engine.speculation.packed_head import PackedHead
from support.eagle import DenseEagle, make_head

BLOCK, SIZE, VOCAB = 16, 64, 260
SIZES = (1, 4, 8)
TOKENS = [7, 11, 200]


def graphs_of(
    heads: Sequence[PackedHead], embed: nn.Module, num_captures: int | None = None
) -> HeadGraphs:
    """A replay computes the pass again. So many captures succeed, or all."""
    pages = KvCache(
        one_group(1, 9),
        [heads[0].kv_shape],
        block_size=BLOCK,
        kv_format=KvFormat(torch.float32),
        device=torch.device("cpu"),
        has_spare_blocks=True,
    )
    done: list[Callable[[], None]] = []

    def capture(compute: Callable[[], None]) -> Callable[[], None]:
        if len(done) == num_captures:
            raise torch.OutOfMemoryError
        done.append(compute)
        return compute

    layout = DecodeLayout(pages.groups, BLOCK, SIZES[-1], 64)
    return HeadGraphs(heads, embed, pages, layout, capture, sizes=SIZES)


@pytest.fixture
def embedding() -> nn.Embedding:
    weight = torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(3))
    made: nn.Embedding = nn.Embedding.from_pretrained(weight)
    return made


@torch.inference_mode()
def test_each_heads_pass_is_replayed_with_its_own_weights(embedding: nn.Embedding) -> None:
    heads = [make_head(seed=seed) for seed in range(3)]
    packed = [PackedHead(head, LoadQuantization()) for head in heads]
    graphs = graphs_of(packed, embedding)
    assert graphs.capture().startswith(f"{3 * len(SIZES)} graphs of passes")
    features = torch.randn(len(TOKENS), SIZE, generator=torch.Generator().manual_seed(4))
    chunk = SequenceChunk(TOKENS, 0, [block_table([2])])
    for index in (2, 0, 1, 2):
        assert graphs.serves(packed[index], len(TOKENS))
        states, logits = graphs.run(packed[index], [chunk], features)
        dense = DenseEagle(heads[index], embedding.weight)
        pairs = zip(TOKENS, features.double(), strict=True)
        (*_, last) = (dense.state(token, feature) for token, feature in pairs)
        assert_near(states[0], last)
        assert_near(logits[0], dense.logits(last))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


def test_heads_that_were_captured_keep_their_graphs_if_another_one_fails(
    embedding: nn.Embedding,
) -> None:
    heads = [PackedHead(make_head(seed=seed), LoadQuantization()) for seed in range(3)]
    graphs = graphs_of(heads, embedding, num_captures=len(SIZES) + 1)
    assert graphs.capture().startswith(f"{len(SIZES)} graphs of passes")
    assert [graphs.serves(head, 1) for head in heads] == [True, False, False]
    assert not graphs.serves(heads[0], SIZES[-1] + 1)


def test_the_memory_plan_has_the_graphs_of_all_heads() -> None:
    config = EngineConfig("base", speculation=("eagle:head",), adapter_draft_heads=2)
    sizes = {"feature_size": SIZE, "num_draft_tokens": VOCAB, "max_model_len": 128}
    one, two, three = (head_graph_bytes(config, **sizes, num_heads=number) for number in (1, 2, 3))
    assert three - two == two - one == len(head_sizes(config)) * (256 << 10)
