"""Medusa drafts: from the correct hidden state, for the correct positions, without side effects."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from loraplex.engine.checkpoint.base_identity import compute_base_id
from loraplex.engine.config import Acceptance
from loraplex.engine.draft import ROOT, Draft
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.execution.sampler import gumbel_noise
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.memory.kv_budget import MIB
from loraplex.engine.messages import GenerationRequest, SpeculationParams
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.speculation.drawing import CoupledDrawing, IndependentDrawing
from loraplex.engine.speculation.medusa import MedusaProposer, chains_by, coupled_trees
from loraplex.engine.speculation.medusa_checkpoint import save_heads
from loraplex.engine.speculation.medusa_heads import MedusaHeads, untrained_heads
from loraplex.engine.speculation.proposer import DraftRequest
from support.engine import LocalEngine
from support.families import SERVED, VOCAB_SIZE, save_family
from support.medusa import make_heads
from support.models import make_adapter, make_tiny_llama

HIDDEN, VOCAB = 64, 260
NUM_HEADS = 3
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def heads() -> MedusaHeads:
    return make_heads(HIDDEN, VOCAB, num_heads=NUM_HEADS)


@pytest.fixture(scope="module")
def checkpoint(
    tiny_base: Path, heads: MedusaHeads, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("medusa")
    save_heads(heads, path, base_id=compute_base_id(tiny_base))
    return path


def dense_states(base: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """What the output head meets at each position, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        output = model(input_ids=torch.tensor([token_ids]), output_hidden_states=True)
    states: torch.Tensor = output.hidden_states[-1][0]
    return states


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_head_j_drafts_the_token_j_places_behind_the_next(
    tiny_base: Path,
    tmp_path: Path,
    checkpoint: Path,
    heads: MedusaHeads,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
) -> None:
    made: list[tuple[list[int], Draft]] = []
    propose = MedusaProposer.propose

    def spying(proposer: MedusaProposer, wanted: Sequence[DraftRequest]) -> list[Draft]:
        drafts = propose(proposer, wanted)
        made.extend(
            (list(entry.request.token_ids), draft)
            for entry, draft in zip(wanted, drafts, strict=True)
        )
        return drafts

    monkeypatch.setattr(MedusaProposer, "propose", spying)
    engine = LocalEngine(tiny_base, tmp_path, speculation=(f"medusa:{checkpoint}",))
    prompt = [5, 80, 33, 7]
    engine.submit(
        prompt,
        max_tokens=NUM_TOKENS,
        temperature=temperature,
        seed=9,
        ignore_eos=True,
        speculation=SpeculationParams(num_tokens=8),
    )
    engine.run()
    engine.close()
    assert len(made) > 5
    states = dense_states(tiny_base, [*prompt, *engine.answers["r0"].token_ids])
    for known, draft in made:
        # The last known token was drawn from the state of the one before it.
        state = states[len(known) - 2]
        assert len(draft) == min(NUM_HEADS, len(prompt) + NUM_TOKENS - len(known) - 1)
        for j, token in enumerate(draft.token_ids):
            logits = heads(state[None])[j, 0]
            if temperature:
                place = torch.tensor([len(known) + j])
                noise = gumbel_noise(torch.tensor([9]), place, VOCAB)[0]
                logits = logits / temperature + noise
            assert logits[token] > logits.max() - 1e-3


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("temperature", [0.0, 0.7, pytest.param(1.3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("proposer", ["medusa", "medusa_tree"])
def test_the_tokens_are_those_of_plain_decoding(
    tmp_path: Path, proposer: str, temperature: float
) -> None:
    # With tied embeddings it repeats itself: heads that say what its own head says may be right.
    base = make_tiny_llama(tmp_path / "base", tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(base)
    heads = untrained_heads(model.get_output_embeddings(), num_heads=2, num_layers=1)
    save_heads(heads, tmp_path / "heads", base_id=compute_base_id(base))
    # The second changes the output head too, so it meets what it is given all the same.
    targets = [["q_proj", "v_proj"], ["q_proj", "lm_head"]]
    folders = [
        make_adapter(base, tmp_path / str(index), seed=index, target_modules=names)
        for index, names in enumerate(targets)
    ]

    def answers(*speculation: str) -> list[list[int]]:
        engine = LocalEngine(base, tmp_path, speculation=speculation)
        keys = [None, *(engine.add_adapter(folder) for folder in folders)]
        rng = random.Random(1)
        for index in range(6):
            prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 30))]
            engine.submit(
                prompt,
                keys[index % 3],
                max_tokens=30,
                temperature=temperature,
                seed=index,
                speculation=SpeculationParams(num_tokens=8),
            )
        engine.run()
        engine.close()
        if speculation:
            ends = [answer.finished for answer in engine.answers.values()]
            assert sum(end.num_accepted_tokens for end in ends if end) > 0
        return [answer.token_ids for answer in engine.answers.values()]

    assert answers(f"{proposer}:{tmp_path / 'heads'}") == answers()


def make_request(request_id: str, prompt: list[int], **sampling: Any) -> Request:
    submitted = GenerationRequest(request_id, "acme", prompt, SamplingParams(**sampling))
    namespace = CacheNamespace("acme", "runtime", None, "")
    return Request(submitted, namespace, seed=7, arrival_time=0.0, adapter_tier=None)


def test_each_request_gets_no_more_than_it_wants_and_nothing_without_a_state(
    heads: MedusaHeads,
) -> None:
    proposer = MedusaProposer("medusa", heads, chains_by(CoupledDrawing()))
    requests = [make_request(str(index), [index], temperature=0.0) for index in range(4)]
    states = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(2))
    for index in (0, 2, 3):
        proposer.observe(requests[index], states[index])
    proposer.observe(requests[3], None)
    wanted = [
        DraftRequest(request, num) for request, num in zip(requests, (1, 4, 9, 2), strict=True)
    ]
    drafts = proposer.propose(wanted)
    best = heads(states).argmax(-1)
    expected = [[int(best[0, 0])], [], best[:, 2].tolist(), []]
    assert [list(draft.token_ids) for draft in drafts] == expected


def test_under_rejection_a_chain_says_what_it_was_drawn_from(heads: MedusaHeads) -> None:
    proposer = MedusaProposer("medusa", heads, chains_by(IndependentDrawing()))
    request = make_request("a", [1, 2, 3], temperature=0.8, top_k=20)
    state = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(2))
    proposer.observe(request, state)
    (draft,) = proposer.propose([DraftRequest(request, 2)])
    logits = heads(state[None])[:2, 0] / 0.8
    cut = logits.masked_fill(logits < logits.topk(20).values[:, -1:], -torch.inf)
    torch.testing.assert_close(draft.probabilities, cut.softmax(-1))
    assert all(cut[place, token] > -torch.inf for place, token in enumerate(draft.token_ids))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_holds_the_chain_and_what_is_likely_beside_it(
    heads: MedusaHeads, temperature: float
) -> None:
    request = make_request("a", [1, 2, 3], temperature=temperature)
    state = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(2))
    trees, chains = (
        MedusaProposer("medusa", heads, make)
        for make in (coupled_trees, chains_by(CoupledDrawing()))
    )
    for proposer in (trees, chains):
        proposer.observe(request, state)
    (tree,) = trees.propose([DraftRequest(request, 8)])
    (chain,) = chains.propose([DraftRequest(request, NUM_HEADS)])
    assert len(tree) == 8
    assert tree.parents is not None
    assert tree.parents.count(ROOT) > 1
    # Of each depth its likeliest token comes first.
    firsts: dict[int, int] = {}
    for index, token in enumerate(tree.token_ids):
        firsts.setdefault(len(tree.path(index)), token)
    assert [firsts[depth] for depth in sorted(firsts)] == list(chain.token_ids[: len(firsts)])


def test_states_are_kept_for_running_requests_only(
    tiny_base: Path, tmp_path: Path, checkpoint: Path
) -> None:
    engine = LocalEngine(tiny_base, tmp_path, speculation=(f"medusa:{checkpoint}",))
    proposer = engine.core.parts.speculation._proposers["medusa"]
    assert isinstance(proposer, MedusaProposer)
    for _ in range(2):
        engine.submit([1, 2, 3], max_tokens=8, ignore_eos=True)
    while not proposer._states:
        engine.step()
    for state in proposer._states.values():
        assert state.untyped_storage().nbytes() == state.nbytes  # not all of its step's
    engine.run()
    engine.close()
    assert proposer._states == {}


def test_heads_are_part_of_the_memory_plan_and_one_checkpoint_is_loaded_once(
    tmp_path: Path,
) -> None:
    base = make_tiny_llama(tmp_path / "base")
    heads = make_heads(HIDDEN, VOCAB, num_heads=NUM_HEADS, num_layers=12)
    save_heads(heads, tmp_path / "heads", base_id=compute_base_id(base))
    names = [f"{name}:{tmp_path / 'heads'}" for name in ("medusa", "medusa_tree")]
    engine = LocalEngine(base, tmp_path, speculation=tuple(names))
    engine.close()
    lines = engine.core.info.memory_plan
    assert f"Medusa heads {heads.weight_bytes / MIB:.1f} MiB" in lines


FAMILIES = ["cohere", "gemma2-softcap-window", "gpt2-conv1d", "granite", "opt", "qwen3_moe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_states_are_those_that_the_models_own_head_meets(family: str, tmp_path: Path) -> None:
    base = save_family(tmp_path / "base", *SERVED[family])
    save_heads(
        make_heads(HIDDEN, VOCAB_SIZE, num_heads=1),
        tmp_path / "heads",
        base_id=compute_base_id(base),
    )
    engine = LocalEngine(base, tmp_path, speculation=(f"medusa:{tmp_path / 'heads'}",))
    proposer = engine.core.parts.speculation._proposers["medusa"]
    assert isinstance(proposer, MedusaProposer)
    engine.submit([5, 80, 33, 7], max_tokens=9, ignore_eos=True)
    seen: list[tuple[int, torch.Tensor]] = []
    while engine.core.has_work:
        engine.step()
        if "r0" in proposer._states:
            seen.append((len(engine.answers["r0"].token_ids), proposer._states["r0"]))
    engine.close()
    assert len(seen) > 3
    states = dense_states(base, [5, 80, 33, 7, *engine.answers["r0"].token_ids])
    for num_generated, state in seen:
        torch.testing.assert_close(state, states[4 + num_generated - 2], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("entry", "acceptance", "reason"),
    [
        ("medusa", Acceptance.COUPLED, "requires a checkpoint"),
        ("medusa_tree:{}", Acceptance.REJECTION, "requires coupled acceptance"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(
    tiny_base: Path,
    tmp_path: Path,
    checkpoint: Path,
    entry: str,
    acceptance: Acceptance,
    reason: str,
) -> None:
    speculation = (entry.format(checkpoint),)
    with pytest.raises(InvalidParameter, match=reason):
        LocalEngine(tiny_base, tmp_path, speculation=speculation, acceptance=acceptance)


def test_heads_of_another_base_are_refused_at_the_start(
    tiny_base: Path, tmp_path: Path, heads: MedusaHeads
) -> None:
    save_heads(heads, tmp_path, base_id="sha256:other")
    with pytest.raises(InvalidParameter, match="another base"):
        LocalEngine(tiny_base, tmp_path, speculation=(f"medusa:{tmp_path}",))
