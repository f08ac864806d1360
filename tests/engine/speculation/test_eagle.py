"""EAGLE drafts: those of an independent head on the base's hidden states, without side effects."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.engine.config import Acceptance, EngineConfig
from loraplex.engine.draft import Draft
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.execution.sampler import gumbel_noise
from loraplex.engine.memory.kv_budget import MIB
from loraplex.engine.messages import SpeculationParams
from loraplex.engine.model.layer_features import LayerFeatures
from loraplex.engine.model.load_quantization import LoadQuantization
from loraplex.engine.request import Request
from loraplex.engine.speculation import watch
from loraplex.engine.speculation.control import Control
from loraplex.engine.speculation.eagle import MAX_PENDING, EagleProposer
from loraplex.engine.speculation.eagle_head import EagleHead
from loraplex.engine.speculation.packed_head import PackedHead
from support.eagle import (
    DenseEagle,
    Made,
    dense_layers,
    save_random_head,
    save_repeating_head,
    spied,
)
from support.engine import LocalEngine
from support.families import SERVED, save_family
from support.marks import marked_slow
from support.models import make_adapter, make_tiny_llama

LAYERS = (1, 1, 2)
NUM_TOKENS = 20
NUM_DRAFTED = 3


@pytest.fixture(scope="module")
def checkpoint(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eagle")
    save_random_head(tiny_base, path, layers=LAYERS)
    return path


@pytest.fixture(scope="module")
def head(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> EagleHead:
    return save_random_head(tiny_base, tmp_path_factory.mktemp("same"), layers=LAYERS)


def assert_drafted(
    head: EagleHead, model: Any, made: Made, token_ids: Sequence[int], *, temperature: float = 0.0
) -> None:
    """Each draft is that of the reference, which sees the whole context."""
    layers = dense_layers(model, LAYERS, token_ids)
    dense = DenseEagle(head, model.get_input_embeddings().weight.detach())
    num_pairs = 0
    for _, known, draft in made:
        assert len(draft) > 0
        state = torch.empty(0)
        for place in range(num_pairs, len(known) - 1):
            state = dense.state(known[place + 1], dense.project(layers[place]))
        num_pairs = len(known) - 1
        for j, token in enumerate(draft.token_ids):
            logits = dense.logits(state)
            if temperature:
                place_of = torch.tensor([len(known) + j])
                noise = gumbel_noise(torch.tensor([9]), place_of, len(logits))[0]
                logits = logits / temperature + noise
            assert logits[token] > logits.max() - 1e-3
            state = dense.state(token, state)
        dense.back_to(num_pairs)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "temperature"),
    [
        (4, 0.7),
        pytest.param(MAX_PENDING + 40, 0.0, marks=pytest.mark.slow),
        pytest.param(1, 0.0, marks=pytest.mark.slow),
    ],
)
def test_drafts_are_those_of_the_reference_on_the_states_of_the_base(
    tiny_base: Path,
    tmp_path: Path,
    checkpoint: Path,
    head: EagleHead,
    num_prompt_tokens: int,
    temperature: float,
) -> None:
    rng = random.Random(num_prompt_tokens)
    prompt = [rng.randrange(256) for _ in range(num_prompt_tokens)]
    with spied() as made:
        engine = LocalEngine(
            tiny_base,
            tmp_path,
            speculation=(f"eagle:{checkpoint}",),
            max_num_batched_tokens=48,
            max_num_seqs=4,
        )
        engine.submit(
            prompt,
            max_tokens=NUM_TOKENS,
            temperature=temperature,
            seed=9,
            ignore_eos=True,
            speculation=SpeculationParams(num_tokens=NUM_DRAFTED),
        )
        engine.run()
        engine.close()
    assert len(made) > 5
    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    tokens = [*prompt, *engine.answers["r0"].token_ids]
    assert_drafted(head, model, made, tokens, temperature=temperature)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_the_tokens_are_those_of_plain_decoding(tmp_path: Path, temperature: float) -> None:
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
            prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 30))]
            engine.submit(
                prompt,
                keys[index % 4],
                max_tokens=30,
                temperature=temperature,
                seed=index,
                speculation=SpeculationParams(num_tokens=4),
            )
        engine.run()
        engine.close()
        if speculation:
            ends = [answer.finished for answer in engine.answers.values()]
            assert sum(end.num_accepted_tokens for end in ends if end) > 0
        return [answer.token_ids for answer in engine.answers.values()]

    assert answers(f"eagle:{tmp_path / 'head'}") == answers()


DRAFTED_FAMILIES = ["qwen3"]
SLOW_DRAFTED_FAMILIES = ["gemma", "mistral-window"]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        *DRAFTED_FAMILIES,
        *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW_DRAFTED_FAMILIES),
    ],
)
def test_the_tokens_of_families_are_those_of_plain_decoding(family: str, tmp_path: Path) -> None:
    """Greedy and sampled, base and adapter, behind a cached prefix and after preemptions."""
    base = save_family(tmp_path / "base", *SERVED[family])
    save_repeating_head(base, tmp_path / "head")
    folder = make_adapter(base, tmp_path / "adapter", seed=1, target_modules=["q_proj", "v_proj"])
    rng = random.Random(3)
    prefix = [rng.randrange(3, 128) for _ in range(16)]
    prompts = [[*prefix, *(rng.randrange(3, 128) for _ in range(4))] for _ in range(12)]

    def run(*speculation: str) -> tuple[list[list[int]], LocalEngine]:
        engine = LocalEngine(
            base, tmp_path, speculation=speculation, kv_block_size=8, kv_cache_bytes=20 * 8 * 512
        )
        keys = [None, engine.add_adapter(folder)]
        engine.load_adapters()
        engine.answers.clear()
        for index, prompt in enumerate(prompts):
            engine.submit(
                prompt,
                keys[index % 2],
                max_tokens=20,
                ignore_eos=True,
                temperature=0.0 if index % 4 < 2 else 0.8,
                seed=index,
                speculation=SpeculationParams(num_tokens=1 + index % 4) if speculation else None,
            )
        engine.run()
        engine.close()
        return [answer.token_ids for answer in engine.answers.values()], engine

    plain, _ = run()
    speculated, engine = run(f"eagle:{tmp_path / 'head'}")
    assert speculated == plain
    ends = [answer.end for answer in engine.answers.values()]
    assert sum(end.num_draft_tokens for end in ends) > 0
    assert engine.core.stats().num_preemptions > 0
    starts = [answer.started for answer in engine.answers.values()]
    assert any(start and start.num_cached_tokens for start in starts)


@pytest.mark.slow
def test_drafts_of_different_lengths_are_those_of_requests_alone(
    tiny_base: Path, tmp_path: Path, checkpoint: Path
) -> None:
    def drafts(lengths: Sequence[int]) -> dict[int, list[Draft]]:
        engine = drafting(tiny_base, tmp_path, checkpoint)
        with spied() as made:
            for length in lengths:
                engine.submit(
                    [5, 80, 33, length],
                    max_tokens=8,
                    ignore_eos=True,
                    request_id=str(length),
                    speculation=SpeculationParams(num_tokens=length),
                )
            engine.run()
            engine.close()
        return {
            length: [draft for request_id, _, draft in made if request_id == str(length)]
            for length in lengths
        }

    together = drafts([1, 2, 5])
    for length, own in together.items():
        assert [draft.token_ids for draft in own] == [
            draft.token_ids for draft in drafts([length])[length]
        ]
        assert any(len(draft) == length for draft in own)


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", Acceptance)
def test_beside_a_drawn_draft_a_longer_greedy_one_is_as_alone(
    tiny_base: Path, tmp_path: Path, checkpoint: Path, acceptance: Acceptance
) -> None:
    def answer(*others: float) -> tuple[list[int], int]:
        engine = drafting(tiny_base, tmp_path, checkpoint, acceptance=acceptance)
        request_ids = [
            engine.submit(
                [5, 80, 33],
                max_tokens=12,
                temperature=temperature,
                seed=1,
                ignore_eos=True,
                speculation=SpeculationParams(num_tokens=length),
            )
            for length, temperature in [(4, 0.0), *((1, other) for other in others)]
        ]
        engine.run()
        engine.close()
        end = engine.answers[request_ids[0]].end
        return engine.tokens(request_ids)[0], end.num_draft_tokens

    assert answer(0.7) == answer()


def test_steps_of_requests_without_drafts_collect_no_hidden_states(
    tiny_base: Path, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = drafting(tiny_base, tmp_path, checkpoint)
    calls: list[object] = []
    combined = LayerFeatures.combined

    def counting(features: LayerFeatures, outputs: dict[int, Tensor]) -> Tensor:
        calls.append(outputs)
        return combined(features, outputs)

    monkeypatch.setattr(LayerFeatures, "combined", counting)
    engine.submit([1, 2, 3], max_tokens=4, speculation=SpeculationParams(num_tokens=0))
    engine.run()
    assert not calls
    engine.submit([1, 2, 3], max_tokens=4, ignore_eos=True)
    engine.run()
    engine.close()
    assert len(calls) >= 4


def test_while_drafts_do_not_pay_few_steps_collect_hidden_states_and_tokens_stay_the_same(
    tiny_base: Path, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LINGER", 4)
    monkeypatch.setattr(watch, "WARM_UP", 2)
    monkeypatch.setattr(Control, "_may_pay", lambda *_: False)
    engines = drafting(tiny_base, tmp_path, checkpoint), LocalEngine(tiny_base, tmp_path)
    features = engines[0].core.parts.runner.features
    assert features is not None
    collected = Mock(side_effect=features.combined)
    monkeypatch.setattr(LayerFeatures, "combined", lambda _features, outputs: collected(outputs))
    answers = []
    for engine in engines:
        ids = [
            engine.submit(
                [1 + row, 2, 3], max_tokens=60, ignore_eos=True, temperature=1.0, seed=row
            )
            for row in range(2)
        ]
        engine.run()
        answers.append(engine.tokens(ids))
        engine.close()
    assert answers[0] == answers[1]
    # How often it is probed depends on the clock.
    assert 5 <= collected.call_count <= 40


def drafting(base: Path, directory: Path, checkpoint: Path, **config: Any) -> LocalEngine:
    return LocalEngine(base, directory, speculation=(f"eagle:{checkpoint}",), **config)


def proposer_of(engine: LocalEngine) -> EagleProposer:
    proposer = engine.core.parts.speculation._proposers["eagle"]
    assert isinstance(proposer, EagleProposer)
    return proposer


def submit(engine: LocalEngine, prompt: list[int], **options: Any) -> None:
    asked = SpeculationParams(num_tokens=NUM_DRAFTED)
    engine.submit(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, speculation=asked, **options)


def test_behind_a_cached_prefix_it_drafts_from_the_tokens_that_it_saw(
    tiny_base: Path, tmp_path: Path, checkpoint: Path, head: EagleHead
) -> None:
    engine = drafting(tiny_base, tmp_path, checkpoint, kv_block_size=16)
    prompt = [(7 * index) % 250 for index in range(40)]
    submit(engine, prompt)
    engine.run()
    with spied() as made:
        submit(engine, prompt)
        engine.run()
    engine.close()
    assert engine.answers["r0"].token_ids == engine.answers["r1"].token_ids
    assert len(made) > 5
    # 32 tokens are cached: the context of the head begins behind them.
    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    layers = dense_layers(model, LAYERS, [*prompt, *engine.answers["r1"].token_ids])
    _, known, draft = made[0]
    dense = DenseEagle(head, model.get_input_embeddings().weight.detach())
    for place in range(32, len(known) - 1):
        state = dense.state(known[place + 1], dense.project(layers[place]))
    assert draft.token_ids[0] == int(dense.logits(state).argmax())


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
            submit(engine, [rng.randrange(250) for _ in range(20)])
        engine.run()
        engine.close()
        return [answer.token_ids for answer in engine.answers.values()], engine

    plain, _ = run()
    speculated, engine = run(f"eagle:{checkpoint}")
    assert speculated == plain
    assert engine.core.stats().num_preemptions > 0
    cache = proposer_of(engine).cache
    cache.check_integrity()
    assert cache.num_free_blocks == cache.num_blocks


def test_what_is_computed_again_after_a_preemption_changes_no_draft(
    tiny_base: Path, tmp_path: Path, checkpoint: Path, head: EagleHead
) -> None:
    engine = drafting(tiny_base, tmp_path, checkpoint)
    proposer = proposer_of(engine)
    with spied() as made, pytest.MonkeyPatch.context() as patch:
        observe = proposer.observe_features

        def twice(request: Request, start: int, features: Tensor) -> None:
            observe(request, start, features)
            observe(request, 0, torch.full((start + len(features), head.config.hidden_size), 7.0))

        patch.setattr(proposer, "observe_features", twice)
        submit(engine, [5, 80, 33, 7])
        engine.run()
    engine.close()
    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    assert_drafted(head, model, made, [5, 80, 33, 7, *engine.answers["r0"].token_ids])


FAMILIES = ["gemma2-softcap-window", "qwen3_moe", "gpt2-conv1d", "cohere", "granite", "opt"]


@pytest.mark.parametrize("family", marked_slow(FAMILIES, slow=FAMILIES[1:]))
def test_the_features_are_those_of_the_models_own_layers(family: str, tmp_path: Path) -> None:
    base = save_family(tmp_path / "base", *SERVED[family])
    model = AutoModelForCausalLM.from_pretrained(base)
    head = save_random_head(base, tmp_path / "head", layers=(1, 1, 1))
    engine = drafting(base, tmp_path, tmp_path / "head")
    seen: list[tuple[int, Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            proposer_of(engine),
            "observe_features",
            lambda _request, start, features: seen.append((start, features.clone())),
        )
        engine.submit([5, 80, 33, 7], max_tokens=9, ignore_eos=True)
        engine.run()
    engine.close()
    assert len(seen) == 9
    with torch.no_grad():
        tokens = torch.tensor([[5, 80, 33, 7, *engine.answers["r0"].token_ids]])
        states = model(input_ids=tokens, output_hidden_states=True).hidden_states[1][0]
    expected = head.fc(torch.cat([states] * 3, dim=-1))
    for start, features in seen:
        own = expected[start : start + len(features)]
        torch.testing.assert_close(features, own, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_an_endless_output_keeps_no_more_of_the_heads_cache_than_a_context(
    tiny_base: Path, tmp_path: Path, checkpoint: Path
) -> None:
    answers = []
    for speculation in [(), (f"eagle:{checkpoint}",)]:
        engine = LocalEngine(
            tiny_base,
            tmp_path,
            speculation=speculation,
            max_model_len=64,
            kv_block_size=8,
            attention_window=24,
            attention_sinks=0,
        )
        engine.submit(
            [5, 80, 33, 7],
            max_tokens=200,
            ignore_eos=True,
            is_endless=True,
            speculation=SpeculationParams(num_tokens=NUM_DRAFTED) if speculation else None,
        )
        most = 0
        with spied() as made:
            while engine.answers["r0"].finished is None:
                engine.step()
                if speculation:
                    cache = proposer_of(engine).cache
                    most = max(most, cache.num_blocks - cache.num_free_blocks)
        engine.close()
        answers.append(engine.answers["r0"].token_ids)
    assert answers[0] == answers[1]
    assert 64 // 8 - 1 <= most <= 64 // 8 + 1, "a context, and its draft tokens"
    assert any(len(known) > 190 and len(draft) for _, known, draft in made)


def test_a_request_whose_cache_was_dropped_drafts_again(
    tiny_base: Path, tmp_path: Path, checkpoint: Path
) -> None:
    engine = drafting(tiny_base, tmp_path, checkpoint)
    proposer = proposer_of(engine)
    with spied() as made:
        submit(engine, [5, 80, 33, 7])
        while len(made) < 4:
            engine.step()
        proposer.cache.drop("r0")
        engine.run()
    engine.close()
    assert all(len(draft) for _, _, draft in made)
    plain = LocalEngine(tiny_base, tmp_path)
    submit_plain(plain, [5, 80, 33, 7])
    assert engine.answers["r0"].token_ids == plain.answers["r0"].token_ids


def submit_plain(engine: LocalEngine, prompt: list[int]) -> None:
    engine.submit(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
    engine.run()
    engine.close()


def test_a_head_that_gives_no_numbers_drafts_nothing_and_harms_nothing(
    tiny_base: Path, tmp_path: Path, checkpoint: Path
) -> None:
    engine = drafting(tiny_base, tmp_path, checkpoint)
    served = proposer_of(engine)._steps.head
    assert isinstance(served, PackedHead)
    served.norms.output.fill_(torch.nan)
    submit(engine, [5, 80, 33, 7])
    engine.run()
    engine.close()
    end = engine.answers["r0"].end
    assert end.num_draft_tokens == 0
    plain = LocalEngine(tiny_base, tmp_path)
    submit_plain(plain, [5, 80, 33, 7])
    assert engine.answers["r0"].token_ids == plain.answers["r0"].token_ids


@pytest.mark.slow
def test_it_keeps_nothing_of_requests_that_have_ended_or_do_not_speculate(
    tiny_base: Path, tmp_path: Path, checkpoint: Path
) -> None:
    engine = drafting(tiny_base, tmp_path, checkpoint)
    proposer = proposer_of(engine)
    for _ in range(3):
        submit(engine, [1, 2, 3])
    engine.submit([1, 2, 3], max_tokens=8, speculation=SpeculationParams(num_tokens=0))
    seen: set[str] = set()
    while engine.core.has_work:
        engine.step()
        seen.update(proposer._pending)
        proposer.cache.check_integrity()
        for pending in proposer._pending.values():
            assert pending.num_tokens <= MAX_PENDING
            for features in pending.features:
                assert features.untyped_storage().nbytes() <= MAX_PENDING * 64 * 4
    engine.close()
    assert seen == {"r0", "r1", "r2"}
    assert proposer._pending == {}
    assert proposer.cache.num_free_blocks == proposer.cache.num_blocks


def test_the_head_and_its_cache_are_part_of_the_memory_plan(
    tiny_base: Path, tmp_path: Path, checkpoint: Path, head: EagleHead
) -> None:
    engine = drafting(tiny_base, tmp_path, checkpoint, kv_block_size=16)
    engine.close()
    num_blocks = proposer_of(engine).cache.num_blocks
    num_bytes = PackedHead(head, LoadQuantization()).weight_bytes
    block_bytes = 16 * 2 * 2 * 16 * 4  # tokens, keys and values, heads, their size, fp32
    said = (
        f"EAGLE head {num_bytes / MIB:.1f} MiB, its KV cache {num_blocks} blocks of 16 "
        f"tokens, {block_bytes} bytes each: {num_blocks * block_bytes / MIB:.1f} MiB"
    )
    assert said in engine.core.info.memory_plan


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_a_base_that_is_divided_has_no_eagle_head(tensor: int, pipeline: int) -> None:
    with pytest.raises(InvalidParameter, match="eagle is not supported with"):
        EngineConfig(
            "m",
            speculation=("eagle:head",),
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
        )


def test_a_checkpoint_must_be_named(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="eagle requires a checkpoint"):
        LocalEngine(tiny_base, tmp_path, speculation=("eagle",))
