"""Trees of a draft model: the likeliest of all nodes, as a dense forward computes them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraplex.engine.config import EngineConfig
from loraplex.engine.draft import Draft
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.request import Request
from loraplex.engine.speculation.draft_model import DraftModelProposer
from loraplex.engine.speculation.draft_model_tree import DraftModelTreeProposer
from loraplex.engine.speculation.proposer import DraftRequest
from support.draft_models import make_proposer, make_request
from support.models import make_tiny_llama

TOLERANCE = 1e-3
SHARPNESS = 2.5
NodePath = tuple[int, ...]


@pytest.fixture(scope="module")
def sharp_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base that is certain of some tokens, so that trees have several levels."""
    path = make_tiny_llama(tmp_path_factory.mktemp("sharp"), tie_word_embeddings=False)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] *= SHARPNESS
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def loaded(sharp_base: Path) -> BaseModel:
    return load_base_model(EngineConfig(str(sharp_base), device="cpu"))


@pytest.fixture(scope="module")
def dense(sharp_base: Path) -> PreTrainedModel:
    """The same model as transformers computes it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(sharp_base, dtype=torch.float32)
    return model.eval()


def make_tree_proposer(model: BaseModel, num_blocks: int = 200) -> DraftModelProposer:
    return make_proposer(model, DraftModelTreeProposer, num_blocks=num_blocks)


def likeliest(
    dense: PreTrainedModel, known: Sequence[int], num_tokens: int
) -> dict[NodePath, float]:
    """The nodes with the largest probabilities, each path computed as a whole. A node that so many
    of its level surpass is left out."""
    found: dict[NodePath, float] = {}
    level: dict[NodePath, float] = {(): 1.0}
    for _ in range(num_tokens):
        paths = list(level)
        with torch.inference_mode():
            logits = dense(torch.tensor([[*known, *path] for path in paths])).logits[:, -1]
        values, tokens = logits.softmax(-1).topk(num_tokens)
        children = {
            (*path, token): level[path] * value
            for path, *row in zip(paths, values.tolist(), tokens.tolist(), strict=True)
            for value, token in zip(*row, strict=True)
        }
        level = dict(sorted(children.items(), key=lambda child: -child[1])[:num_tokens])
        found |= level
    return dict(sorted(found.items(), key=lambda node: -node[1])[:num_tokens])


def paths_of(draft: Draft) -> list[NodePath]:
    return [
        tuple(draft.token_ids[place] for place in draft.path(index)) for index in range(len(draft))
    ]


def assert_likeliest(
    dense: PreTrainedModel, request: Request, draft: Draft, num_tokens: int
) -> None:
    nodes, paths = likeliest(dense, request.token_ids, num_tokens), paths_of(draft)
    assert len(set(paths)) == len(paths) == num_tokens
    # Which of equals is taken is rounding.
    least = min(nodes.values())
    assert all(nodes.get(path, least) >= least * (1 - TOLERANCE) for path in paths)
    assert len(nodes.keys() & set(paths)) >= num_tokens - 1


@pytest.mark.parametrize("num_blocks", [pytest.param(200, marks=pytest.mark.slow), 30])
def test_takes_the_likeliest_of_all_nodes_whatever_was_accepted(
    loaded: BaseModel, dense: PreTrainedModel, num_blocks: int
) -> None:
    """Any path of a tree may be accepted, with or without a token that nobody drafted."""
    rng = random.Random(num_blocks)
    proposer = make_tree_proposer(loaded, num_blocks)
    requests = [
        make_request(str(index), [rng.randrange(256) for _ in range(5 + 6 * index)])
        for index in range(4)
    ]
    num_moved = 0
    for _ in range(12):
        wanted = [
            DraftRequest(request, rng.randrange(1, 9))
            for request in rng.sample(requests, rng.randrange(1, 5))
        ]
        for (request, num_tokens), draft in zip(wanted, proposer.propose(wanted), strict=True):
            if not len(draft):  # there was no room
                assert num_blocks == 30
                request.token_ids.append(rng.randrange(256))
                continue
            assert_likeliest(dense, request, draft, num_tokens)
            path = draft.path(rng.randrange(len(draft)))
            num_moved += path != list(range(len(path)))
            request.token_ids += [draft.token_ids[index] for index in path]
            if rng.random() < 0.7:
                request.token_ids.append(rng.randrange(256))
        proposer.cache.check_integrity()
    assert num_moved > 3, "paths were not at the beginning of what was written"
    for request in requests:
        proposer.forget(request.request_id)
    assert proposer.cache.num_free_blocks == num_blocks


def record_rows(proposer: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of each pass, sequence by sequence."""
    rows: list[list[int]] = []
    run = proposer._run

    def recorded(chunks: Any) -> Tensor:
        rows.append([token for chunk in chunks for token in chunk.token_ids])
        logits: Tensor = run(chunks)
        return logits

    monkeypatch.setattr(proposer, "_run", recorded)
    return rows


def test_accepted_tokens_that_were_expanded_are_not_computed_again(
    loaded: BaseModel, dense: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = make_tree_proposer(loaded)
    request = make_request("a", [5, 80, 33, 7])
    proposer.propose([DraftRequest(request, 12)])
    assert proposer.cache.settle(request).num_computed == 3, "nobody accepted the others"
    proposer.propose([DraftRequest(request, 12)])
    written = proposer.cache._sequences["a"].drafted
    moved = [index for index in range(len(written)) if written.path(index)[0] > 0]
    deepest = max(map(written.path, moved), key=len)
    request.token_ids += [*(written.token_ids[index] for index in deepest), 9]
    rows = record_rows(proposer, monkeypatch)
    (draft,) = proposer.propose([DraftRequest(request, 2)])
    assert rows[0] == [9]
    assert_likeliest(dense, request, draft, 2)


def test_a_level_holds_its_own_nodes_alone(
    loaded: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = make_tree_proposer(loaded)
    request = make_request("a", [5, 80, 33, 7])
    rows = record_rows(proposer, monkeypatch)
    (draft,) = proposer.propose([DraftRequest(request, 6)])
    assert sum(map(len, rows[1:])) <= 2 * len(draft)
    assert len(rows) <= len(draft)


def test_requests_together_get_the_trees_that_they_get_alone(loaded: BaseModel) -> None:
    requests = [make_request(str(size), [5, 80, size]) for size in (1, 3, 40)]
    wanted = [DraftRequest(request, int(request.request_id)) for request in requests]
    together = make_tree_proposer(loaded).propose(wanted)
    for entry, draft in zip(wanted, together, strict=True):
        (alone,) = make_tree_proposer(loaded).propose([entry])
        assert paths_of(draft) == paths_of(alone)


@pytest.mark.parametrize("when", [0, 1])
def test_a_request_whose_numbers_break_down_costs_nobody_else_a_tree(
    loaded: BaseModel, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    """In the first pass or within a tree: what it has is its draft, and its cache is given up."""
    requests = [make_request(name, [5, 80, 33, index]) for index, name in enumerate("ab")]
    wanted = [DraftRequest(request, 4) for request in requests]
    expected = make_tree_proposer(loaded).propose(wanted)
    proposer = make_tree_proposer(loaded)
    run, calls = proposer._run, iter(range(99))

    def broken(chunks: Any) -> Tensor:
        logits = run(chunks).clone()
        if next(calls) == when:
            first = next(index for index, chunk in enumerate(chunks) if is_first(chunk))
            start = sum(chunk.num_logits_rows for chunk in chunks[:first])
            logits[start, 7] = float("nan")
        return logits

    def is_first(chunk: Any) -> bool:
        return chunk.tables is proposer.cache._sequences["a"].tables

    monkeypatch.setattr(proposer, "_run", broken)
    first, second = proposer.propose(wanted)
    assert paths_of(second) == paths_of(expected[1])
    assert len(first) == (0 if when == 0 else 4)
    assert "a" not in proposer.cache
    again = proposer.propose(wanted)
    assert [paths_of(draft) for draft in again] == [paths_of(draft) for draft in expected]
    proposer.cache.check_integrity()
