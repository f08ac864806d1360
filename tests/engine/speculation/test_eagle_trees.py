"""Trees of an EAGLE head: the likeliest of all nodes, which an independent head computes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.engine.checkpoint.base_identity import compute_base_id
from loraplex.engine.config import Acceptance, EngineConfig
from loraplex.engine.draft import Draft
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.execution.sampler import gumbel_noise
from loraplex.engine.messages import SpeculationParams
from loraplex.engine.speculation.eagle import EagleTreeProposer
from loraplex.engine.speculation.eagle_checkpoint import save_head
from loraplex.engine.speculation.eagle_head import EagleHead
from support.eagle import DenseEagle, dense_layers, make_head, save_repeating_head, spied
from support.engine import LocalEngine
from support.marks import marked_slow
from support.models import make_adapter, make_tiny_llama

LAYERS = (1, 1, 2)
NUM_NODES, NUM_TOKENS = 3, 20
SEED = 9
GREEDY, HOT = 0.0, 2.0
"""Where it is hot, the noise decides, which the head knows: many of its draft tokens are right."""
NodePath = tuple[int, ...]


@pytest.fixture(scope="module")
def head() -> EagleHead:
    return make_head()


@pytest.fixture(scope="module")
def checkpoint(tiny_base: Path, head: EagleHead, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eagle")
    save_head(head, path, layers=LAYERS, base_id=compute_base_id(tiny_base))
    return path


def drafting(base: Path, directory: Path, checkpoint: Path, **config: Any) -> LocalEngine:
    return LocalEngine(base, directory, speculation=(f"eagle_tree:{checkpoint}",), **config)


def proposer_of(engine: LocalEngine) -> EagleTreeProposer:
    proposer = engine.core.parts.speculation._proposers["eagle_tree"]
    assert isinstance(proposer, EagleTreeProposer)
    return proposer


def all_nodes(
    dense: DenseEagle, state: Tensor, num_known: int, temperature: float
) -> dict[NodePath, float]:
    """The probabilities of all nodes of NUM_NODES levels, but for children that NUM_NODES siblings
    surpass. `state`: of the last known pair."""
    num_pairs = len(dense._keys)
    nodes: dict[NodePath, float] = {}

    def expand(path: NodePath, probability: float, state: Tensor) -> None:
        logits = dense.logits(state)
        if temperature:
            place = torch.tensor([num_known + len(path)])
            noise = gumbel_noise(torch.tensor([SEED]), place, len(logits))[0]
            logits = logits + temperature * noise
        values, tokens = logits.softmax(-1).topk(NUM_NODES)
        for value, token in zip(values.tolist(), tokens.tolist(), strict=True):
            nodes[*path, token] = probability * value
            if len(path) + 1 < NUM_NODES:
                dense.back_to(num_pairs + len(path))
                expand((*path, token), probability * value, dense.state(token, state))

    expand((), 1.0, state)
    dense.back_to(num_pairs)
    return nodes


def paths_of(draft: Draft) -> list[NodePath]:
    return [
        tuple(draft.token_ids[place] for place in draft.path(index)) for index in range(len(draft))
    ]


@pytest.mark.parametrize("temperature", marked_slow([HOT, GREEDY], slow=[GREEDY]))
def test_takes_the_likeliest_of_all_nodes_after_whatever_was_accepted(
    tiny_base: Path, tmp_path: Path, checkpoint: Path, head: EagleHead, temperature: float
) -> None:
    prompt = [5, 80, 33, 7]
    engine = drafting(tiny_base, tmp_path, checkpoint)
    with spied() as made:
        engine.submit(
            prompt,
            max_tokens=NUM_TOKENS,
            temperature=temperature,
            seed=SEED,
            ignore_eos=True,
            speculation=SpeculationParams(num_tokens=NUM_NODES),
        )
        engine.run()
        engine.close()
    end = engine.answers["r0"].end
    assert (end.num_accepted_tokens > 2) == (temperature == HOT)
    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    layers = dense_layers(model, LAYERS, [*prompt, *engine.answers["r0"].token_ids])
    dense = DenseEagle(head, model.get_input_embeddings().weight.detach())
    num_pairs = 0
    for _, known, draft in made:
        state = torch.empty(0)
        for place in range(num_pairs, len(known) - 1):
            state = dense.state(known[place + 1], dense.project(layers[place]))
        num_pairs = len(known) - 1
        nodes = all_nodes(dense, state, len(known), temperature)
        likeliest = sorted(nodes.values(), reverse=True)[: len(draft)]
        paths = paths_of(draft)
        room = len(prompt) + NUM_TOKENS - len(known) - 1
        assert len(set(paths)) == len(paths) == min(NUM_NODES, room)
        assert [nodes[path] for path in paths] == pytest.approx(likeliest, rel=1e-3)
    depths = {len(path) for _, _, draft in made for path in paths_of(draft)}
    assert any(draft.parents is not None for _, _, draft in made)
    assert len(depths) > 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("temperature", [0.7, GREEDY])
def test_the_tokens_are_those_of_plain_decoding(tmp_path: Path, temperature: float) -> None:
    """Requests of several adapters together, with trees of one to eight nodes."""
    # With tied embeddings it repeats itself: a head that says what it said before may be right.
    base = make_tiny_llama(tmp_path / "base", tie_word_embeddings=True)
    save_repeating_head(base, tmp_path / "head")
    targets = [["q_proj", "v_proj"], ["q_proj", "lm_head"], ["q_proj", "embed_tokens"]]
    folders = [
        make_adapter(base, tmp_path / str(index), seed=index, target_modules=names)
        for index, names in enumerate(targets)
    ]

    def answers(*speculation: str) -> list[list[int]]:
        engine = LocalEngine(base, tmp_path, speculation=speculation)
        keys = [None, *(engine.add_adapter(folder) for folder in folders)]
        rng = random.Random(1)
        for index in range(8):
            engine.submit(
                [rng.randrange(256) for _ in range(rng.randrange(1, 30))],
                keys[index % 4],
                max_tokens=30,
                temperature=temperature if index % 3 else 0.0,
                seed=index,
                speculation=SpeculationParams(num_tokens=1 + index),
            )
        engine.run()
        engine.close()
        if speculation:
            ends = [answer.end for answer in engine.answers.values()]
            assert sum(end.num_accepted_tokens for end in ends) > 5
        return [answer.token_ids for answer in engine.answers.values()]

    assert answers(f"eagle_tree:{tmp_path / 'head'}") == answers()


@pytest.mark.slow
def test_trees_of_different_sizes_are_those_of_requests_alone(
    tiny_base: Path, tmp_path: Path, checkpoint: Path
) -> None:
    def drafts(sizes: Sequence[int]) -> dict[str, list[Draft]]:
        engine = drafting(tiny_base, tmp_path, checkpoint, max_draft_tokens=40)
        with spied() as made:
            for size in sizes:
                engine.submit(
                    [5, 80, 33, size],
                    max_tokens=size + 4,
                    temperature=0.0 if size < 5 else 0.7,
                    seed=1,
                    ignore_eos=True,
                    request_id=str(size),
                    speculation=SpeculationParams(num_tokens=size),
                )
            engine.run()
            engine.close()
        return {
            str(size): [draft for request_id, _, draft in made if request_id == str(size)]
            for size in sizes
        }

    together = drafts([1, 2, 5, 40])
    for size, own in together.items():
        alone = drafts([int(size)])[size]
        assert list(map(paths_of, own)) == list(map(paths_of, alone))
        assert any(len(draft) == int(size) for draft in own)


def test_nothing_is_drafted_behind_a_token_that_ends_the_output(
    tiny_base: Path, tmp_path: Path, checkpoint: Path
) -> None:
    def drafts(*stop_token_ids: int) -> list[Draft]:
        engine = drafting(tiny_base, tmp_path, checkpoint)
        with spied() as made:
            engine.submit(
                [5, 80, 33, 7],
                max_tokens=12,
                ignore_eos=True,
                stop_token_ids=stop_token_ids,
                speculation=SpeculationParams(num_tokens=8),
            )
            engine.run()
            engine.close()
        return [draft for _, _, draft in made]

    def parents(draft: Draft) -> set[int]:
        return {path[-2] for path in paths_of(draft) if len(path) > 1}

    first = drafts()[0]
    stop = next(token for token in first.token_ids if token in parents(first))
    assert stop in drafts(stop)[0].token_ids
    assert not any(stop in parents(draft) for draft in drafts(stop))


@pytest.mark.slow
def test_under_pressure_nothing_changes_and_nothing_leaks(
    tiny_base: Path, tmp_path: Path, checkpoint: Path
) -> None:
    """Few blocks: preemptions in the base's cache, caches given up in the head's."""

    def run(*speculation: str) -> tuple[list[list[int]], LocalEngine]:
        engine = LocalEngine(
            tiny_base,
            tmp_path,
            speculation=speculation,
            kv_block_size=8,
            kv_cache_bytes=70 * 8 * 512,
        )
        rng = random.Random(2)
        for _ in range(24):
            engine.submit(
                [rng.randrange(250) for _ in range(20)],
                max_tokens=20,
                ignore_eos=True,
                speculation=SpeculationParams(num_tokens=NUM_NODES),
            )
        engine.run()
        engine.close()
        return [answer.token_ids for answer in engine.answers.values()], engine

    plain, _ = run()
    speculated, engine = run(f"eagle_tree:{checkpoint}")
    assert speculated == plain
    assert engine.core.stats().num_preemptions > 0
    cache = proposer_of(engine).cache
    cache.check_integrity()
    assert cache.num_free_blocks == cache.num_blocks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run_levels", "run"])
def test_a_head_that_gives_no_numbers_harms_nothing_and_is_forgotten(
    tiny_base: Path, tmp_path: Path, checkpoint: Path, name: str
) -> None:
    """From the first pass on, or within a tree."""
    engine = drafting(tiny_base, tmp_path, checkpoint)
    proposer = proposer_of(engine)
    run, failed = getattr(proposer._steps, name), []

    def failing(*args: Any) -> tuple[Tensor, Tensor]:
        states, logits = run(*args)
        failed.append(logits)
        return states, torch.full_like(logits, torch.nan)

    with pytest.MonkeyPatch.context() as patch, spied() as made:
        patch.setattr(proposer._steps, name, failing)
        engine.submit(
            [5, 80, 33, 7],
            max_tokens=12,
            ignore_eos=True,
            speculation=SpeculationParams(num_tokens=NUM_NODES),
        )
        while not failed:
            engine.step()
        assert len(made[-1][2]) == (0 if name == "run" else NUM_NODES)
        assert "r0" not in proposer.cache
        engine.run()
    engine.close()
    plain = LocalEngine(tiny_base, tmp_path)
    plain.submit([5, 80, 33, 7], max_tokens=12, ignore_eos=True)
    plain.run()
    plain.close()
    assert engine.answers["r0"].token_ids == plain.answers["r0"].token_ids


@pytest.mark.parametrize(
    ("entries", "acceptance", "reason"),
    [
        (("eagle_tree",), Acceptance.COUPLED, "requires a checkpoint"),
        (("eagle_tree:{}",), Acceptance.REJECTION, "requires coupled acceptance"),
        (("eagle:{}", "eagle_tree:{}"), Acceptance.COUPLED, "cannot be combined"),
        (("eagle_tree:no-such",), Acceptance.COUPLED, "eagle_tree: "),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(
    tiny_base: Path,
    tmp_path: Path,
    checkpoint: Path,
    entries: Sequence[str],
    acceptance: Acceptance,
    reason: str,
) -> None:
    speculation = tuple(entry.format(checkpoint) for entry in entries)
    with pytest.raises(InvalidParameter, match=reason):
        LocalEngine(tiny_base, tmp_path, speculation=speculation, acceptance=acceptance)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_a_base_that_is_divided_has_no_trees_of_a_head(tensor: int, pipeline: int) -> None:
    with pytest.raises(InvalidParameter, match="eagle_tree is not supported with"):
        EngineConfig(
            "m",
            speculation=("eagle_tree:head",),
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
        )
