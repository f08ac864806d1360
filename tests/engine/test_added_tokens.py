"""Adapters with tokens of their own: equal to PEFT on the resized base, and nobody else's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from loraplex.adapters.export import export_adapter
from loraplex.adapters.identity import AdapterKey
from loraplex.engine.config import Acceptance, EngineConfig
from loraplex.engine.execution.grammars import Backend, Grammars
from loraplex.engine.grammars.spec import GrammarKind, GrammarSpec
from loraplex.engine.messages import FinishReason, Pooling, SpeculationParams
from loraplex.engine.model.whole_base import load_base_model
from loraplex.kernels.lora_batch import LoraBatchBuilder
from support.engine import MIB, LocalEngine
from support.families import SERVED, VOCAB_SIZE, save_family
from support.features import dense_logits, load_plain, make_memory
from support.grammars import ScriptedAutomaton, SequentialExecutor
from support.paged import paged_logits
from support.resized_adapters import ADDED, NUM_ADDED, RECIPES, examine_resized, save_resized

TOLERANCE = 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma2-softcap-window"])
def test_every_way_of_adding_tokens_equals_peft_in_one_mixed_batch(
    family: str, tmp_path: Path
) -> None:
    model = save_family(tmp_path / "base", *SERVED[family])
    base = load_base_model(EngineConfig(str(model), device="cpu", dtype="float32"))
    host, arena = make_memory(base)
    tuned, rows, sequences = [], [], [list(range(20, 40))]
    for index, (name, recipe) in enumerate(RECIPES.items()):
        path, block = tmp_path / str(index), tmp_path / f"{index}.block"
        tuned.append(save_resized(model, path, recipe, seed=index))
        report = examine_resized(path, block, base.layout)
        own_size = None if name.startswith("fewer rows") else VOCAB_SIZE + recipe.num_added
        assert report.vocab_size == own_size, name
        read = host.read(AdapterKey("acme", report.digest), block)
        assert read is not None
        placement = arena.place(
            read.key, read.num_elements, read.table, read.auxiliary, vocab_size=read.vocab_size
        )
        assert placement is not None
        arena.copy_into(placement, read)
        arena.publish(placement)
        rows.append((placement.row, placement.generation))
        added = range(VOCAB_SIZE, VOCAB_SIZE + recipe.num_added)
        sequences.append([7, *added, 5, 90, *range(index, index + 9), *added])
    sequences.append([9, 8, 7])

    logits = paged_logits(
        base,
        sequences,
        builder=LoraBatchBuilder(arena, base.device),
        adapters=[(-1, 0), *rows, (-1, 0)],
    )

    plain = load_plain(model)
    for index in (0, -1):
        expected = dense_logits(plain, sequences[index])
        assert (logits[index][:, :VOCAB_SIZE] - expected).abs().max() < TOLERANCE
    for name, own, tokens, ours in zip(RECIPES, tuned, sequences[1:-1], logits[1:-1], strict=True):
        expected = dense_logits(own, tokens)
        assert (ours[:, : expected.shape[1]] - expected).abs().max() < TOLERANCE, name


@pytest.mark.parametrize("name", ["rows of the resized matrices", "trained rows, old and new"])
def test_restored_files_are_an_adapter_of_the_same_digest(name: str, tmp_path: Path) -> None:
    model = save_family(tmp_path / "base", *SERVED["llama"])
    layout = load_base_model(EngineConfig(str(model), device="cpu", dtype="float32")).layout
    tuned = save_resized(model, tmp_path / "tuned", RECIPES[name], seed=1)
    report = examine_resized(tmp_path / "tuned", tmp_path / "block", layout)
    restored = tmp_path / "restored"
    restored.mkdir()
    export_adapter(tmp_path / "block", restored)
    assert examine_resized(restored, tmp_path / "again", layout).digest == report.digest
    assert (tmp_path / "again").read_bytes() == (tmp_path / "block").read_bytes()
    resized = load_plain(model)
    resized.resize_token_embeddings(VOCAB_SIZE + NUM_ADDED, mean_resizing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's remark on the resized embedding
        loaded = PeftModel.from_pretrained(resized, restored).eval()
    assert torch.equal(dense_logits(loaded, [1, *ADDED]), dense_logits(tuned, [1, *ADDED]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("added") / "base", *SERVED["llama"])


@pytest.fixture(scope="module")
def tuned(model: Path) -> Path:
    """An adapter with tokens of its own."""
    path = model.parent / "tuned"
    save_resized(model, path, RECIPES["trained rows, old and new"], seed=3)
    return path


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(model, tmp_path)
    yield engine
    engine.close()


PROMPT = [7, 8, 9, 7, 8]


def test_no_other_row_samples_an_added_token(engine: LocalEngine, tuned: Path) -> None:
    own = engine.add_adapter(tuned)
    settings: dict[str, Any] = {"max_tokens": 40, "temperature": 2.0, "ignore_eos": True}
    alone = engine.submit(PROMPT, seed=1, **settings)
    engine.run()
    mixed = [engine.submit(PROMPT, seed=seed, **settings) for seed in (1, 2, 3)]
    bias = dict.fromkeys(ADDED, 5.0)
    added = engine.submit(PROMPT, own, seed=1, logit_bias=bias, **settings)
    engine.run()
    assert set(engine.answers[added].token_ids) & set(ADDED), "it samples its own"
    for request_id in mixed:
        assert max(engine.answers[request_id].token_ids) < VOCAB_SIZE
    assert engine.answers[mixed[0]].token_ids == engine.answers[alone].token_ids


def test_added_tokens_are_prompts_of_their_own_adapter_alone(
    engine: LocalEngine, tuned: Path
) -> None:
    own = engine.add_adapter(tuned)
    wanted = engine.submit([*PROMPT, *ADDED], own, max_tokens=4, ignore_eos=True)
    others = engine.submit([*PROMPT, *ADDED])
    beyond = engine.submit([*PROMPT, ADDED[-1] + 1], own)
    engine.run()
    assert len(engine.answers[wanted].token_ids) == 4
    for request_id in (others, beyond):
        error = engine.answers[request_id].end.error
        assert error is not None
        assert error.code == "invalid_parameter"


@pytest.mark.parametrize("acceptance", list(Acceptance))
def test_drafts_of_added_tokens_change_nothing(
    acceptance: Acceptance, model: Path, tuned: Path, tmp_path: Path
) -> None:
    """Of the proposers, only those that copy tokens draft for such an adapter."""
    plain = LocalEngine(model, tmp_path)
    drafting = LocalEngine(
        model,
        tmp_path,
        speculation=("ngram", "suffix", f"draft:{model}"),
        acceptance=acceptance,
        kv_cache_bytes=8 * MIB,
    )
    answers = []
    for engine, asked in ((plain, None), (drafting, SpeculationParams(num_tokens=3))):
        own = engine.add_adapter(tuned)
        prompt = [*ADDED, *ADDED, *ADDED]
        ids = [
            engine.submit(prompt, own, max_tokens=12, ignore_eos=True, speculation=asked),
            engine.submit(PROMPT, max_tokens=12, ignore_eos=True, speculation=asked),
        ]
        engine.run()
        answers.append(engine.tokens(ids))
        engine.close()
    assert answers[0] == answers[1]


def test_a_grammar_ends_with_the_adapters_own_end_token(
    model: Path, tuned: Path, tmp_path: Path
) -> None:
    """Other added tokens are no part of what a grammar describes."""
    automaton = ScriptedAutomaton(lambda tokens: {3, 0} if len(tokens) > 1 else {3})
    backend = Backend(lambda _: automaton, SequentialExecutor(), frozenset({0}), VOCAB_SIZE)
    engine = LocalEngine(model, tmp_path, grammars=Grammars(backend))
    own = engine.add_adapter(tuned)
    request_id = engine.submit(
        PROMPT,
        own,
        max_tokens=9,
        grammar=GrammarSpec(GrammarKind.REGEX, "any"),
        own_end_token_ids=(ADDED[0],),
        logit_bias={ADDED[0]: 50.0, ADDED[1]: 100.0},
    )
    engine.run()
    assert engine.answers[request_id].token_ids == [3, 3, ADDED[0]]
    assert engine.answers[request_id].end.reason is FinishReason.STOP
    engine.close()


def test_prompt_logprobs_and_embeddings_equal_peft(
    model: Path, engine: LocalEngine, tmp_path: Path
) -> None:
    tuned = save_resized(model, tmp_path / "tuned", RECIPES["whole ends"], seed=5)
    own = engine.add_adapter(tmp_path / "tuned")
    prompt = [*PROMPT, *ADDED, *PROMPT]
    logprobs = engine.submit(prompt, own, max_tokens=1, num_prompt_logprobs=0)
    vector = engine.submit(prompt, own, max_tokens=0, pooling=Pooling.MEAN)
    engine.run()
    targets = torch.tensor(prompt[1:])[:, None]
    expected = dense_logits(tuned, prompt).log_softmax(-1)[:-1].gather(-1, targets)
    found = [
        entry.chosen.logprob
        for output in engine.answers[logprobs].prompts
        for entry in output.logprobs or ()
    ]
    assert torch.allclose(torch.tensor(found), expected[:, 0], atol=TOLERANCE)
    assert engine.answers[vector].prompts[-1].embedding is not None
