"""Drafts and trees of every proposer give the tokens of one rank without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from loraplex.engine.errors import InvalidParameter
from loraplex.engine.messages import SpeculationParams
from support.engine import LocalEngine
from support.families import SERVED, save_family
from support.medusa import save_untrained_heads
from support.models import make_adapter, make_tiny_llama
from support.ranks import followers_as_threads

PROPOSERS = {
    "draft": "draft:{base}",
    "draft_tree": "draft_tree:{base}",
    "early_exit": "early_exit:1",
    "early_exit_tree": "early_exit_tree:1",
    "quantized": "quantized:int4",
    "skip": "skip:0",
    "medusa": "medusa:{heads}",
    "medusa_tree": "medusa_tree:{heads}",
}
"""What the engine's configuration says."""
PROMPTS = ([7, 8, 9] * 6, [40, 2, 100, 3, 17])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("base"), tie_word_embeddings=False)


def answer(
    base: Path, folder: Path, speculation: Sequence[str], size: int
) -> tuple[list[list[int]], int]:
    """The tokens of requests with and without an adapter, and how many of them were drafted."""
    engine = LocalEngine(
        base,
        folder,
        dtype="float32",
        num_threads=1,
        tensor_parallel_size=size,
        speculation=tuple(speculation),
    )
    key = engine.add_adapter(make_adapter(base, folder / f"{size}{speculation}", seed=1, scale=0.1))
    asked = SpeculationParams(num_tokens=4) if speculation else None
    ids = [
        engine.submit(prompt, adapter, max_tokens=40, speculation=asked)
        for prompt in PROMPTS
        for adapter in (None, key)
    ]
    engine.run()
    engine.close()
    ends = [engine.answers[request_id].end for request_id in ids]
    assert not [end.error for end in ends if end.error]
    return engine.tokens(ids), sum(end.num_accepted_tokens for end in ends)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_drafts_give_the_tokens_of_one_rank_without_drafts(
    base: Path, tmp_path: Path, proposer: str, size: int
) -> None:
    save_untrained_heads(base, tmp_path / "heads")
    expected, _ = answer(base, tmp_path, (), 1)
    configured = PROPOSERS[proposer].format(base=base, heads=tmp_path / "heads")
    with followers_as_threads():
        found, num_accepted = answer(base, tmp_path, (configured,), size)
    assert found == expected
    assert num_accepted > 0


def test_experts_of_ranks_draft_with_their_rounded_copies(tmp_path: Path) -> None:
    base = save_family(tmp_path / "base", *SERVED["mixtral"])
    expected, _ = answer(base, tmp_path, (), 1)
    with followers_as_threads():
        found, num_accepted = answer(base, tmp_path, ("quantized:int8",), 2)
    assert found == expected
    assert num_accepted > 0


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [("early_exit:2", "from 1 to 1"), ("skip:5", "the base has no layer 5")],
)
def test_layers_that_are_refused_leave_no_follower(
    base: Path, tmp_path: Path, entry: str, complaint: str
) -> None:
    with followers_as_threads(), pytest.raises(InvalidParameter, match=complaint):
        LocalEngine(base, tmp_path, tensor_parallel_size=2, speculation=(entry,))
