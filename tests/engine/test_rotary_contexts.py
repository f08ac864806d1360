"""Bases whose rotary frequencies depend on the length (longrope, dynamic), against transformers.

Requests on both sides of the original context share steps, each with its own frequencies.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.kv_policy import EvictionMethod, KvPolicy
from loraplex.engine.messages import Pooling, SpeculationParams
from loraplex.engine.model.rope import RotaryContexts, full_context, rotary_contexts
from loraplex.engine.model.rotary_tables import table_rotary
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.scheduling.step_costs import StepCosts
from support.arena import load_adapters
from support.engine import LocalEngine
from support.families import VOCAB_SIZE
from support.greedy import assert_greedy, load_dense
from support.length_ropes import (
    BORDER,
    LENGTH_ROPES,
    LONGEST,
    load_dense_for,
    logits_of,
    save,
)
from support.marks import marked_slow
from support.models import make_adapter
from support.paged import paged_logits
from support.peft_parity import TOLERANCE

SAMPLE = ("phi3", "gemma3-dynamic")
CASES = marked_slow(LENGTH_ROPES, slow=set(LENGTH_ROPES) - set(SAMPLE))
PROMPT = [5, 17, 90, 3, 44, 8, 61, 2, 7, 7, 12]


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("phi3"), "phi3")


@pytest.fixture(scope="module")
def engine(phi3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    """Its prompts take several steps."""
    folder = tmp_path_factory.mktemp("blocks")
    engine = open_engine(phi3, folder, max_num_batched_tokens=16, max_num_seqs=4)
    yield engine
    engine.close()


def random_tokens(length: int, *, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def open_engine(path: Path, folder: Path, **config: Any) -> LocalEngine:
    return LocalEngine(path, folder, **{"kv_block_size": 4, "dtype": "float32", **config})


# --- the forward pass -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_mixed_batch_equals_transformers_with_the_frequencies_of_each_length(
    case: str, tmp_path: Path
) -> None:
    path = save(tmp_path, case)
    base = load_base_model(EngineConfig(str(path), device="cpu"))
    sequences = [
        random_tokens(length, seed=length) for length in (BORDER, BORDER + 1, 7, 60, LONGEST)
    ]
    short, long = load_dense_for(path, BORDER), load_dense_for(path, LONGEST)

    logits = paged_logits(base, sequences)

    for tokens, ours in zip(sequences, logits, strict=True):
        dense, other = (long, short) if len(tokens) > BORDER else (short, long)
        expected = logits_of(dense, tokens)
        assert (ours - expected).abs().max() / expected.abs().max() < TOLERANCE
        if tokens is sequences[3]:
            differing = (expected - logits_of(other, tokens)).abs().max()
            assert differing > 100 * TOLERANCE, "the frequencies must have an effect"


def test_transformers_itself_has_these_frequencies_for_longrope(phi3: Path) -> None:
    for length in (BORDER, BORDER + 1):
        tokens = random_tokens(length)
        forced = load_dense_for(phi3, length)
        assert torch.equal(logits_of(load_dense(phi3), tokens), logits_of(forced, tokens))


@pytest.mark.slow
def test_adapters_beyond_the_original_context_equal_peft(phi3: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    folder = make_adapter(phi3, tmp_path / "adapter", seed=3, scale=0.1, r=3)
    base = load_base_model(EngineConfig(str(phi3), device="cpu"))
    builder, rows = load_adapters(base, [folder], tmp_path)
    sequences = [random_tokens(length, seed=length) for length in (BORDER, 50, BORDER + 1)]
    logits = paged_logits(base, sequences, builder=builder, adapters=[rows[0], rows[0], (-1, 0)])
    plain = load_dense(phi3)
    assert (logits[2] - logits_of(plain, sequences[2])).abs().max() < TOLERANCE
    tuned = PeftModel.from_pretrained(plain, folder).eval()
    for tokens, ours in zip(sequences[:2], logits, strict=False):
        assert (ours - logits_of(tuned, tokens)).abs().max() < TOLERANCE


# --- the engine -----------------------------------------------------------------------------------

CROWDS = [(swap_bytes, is_async) for swap_bytes in (0, 1 << 20) for is_async in (False, True)]


@pytest.mark.parametrize("crowd", marked_slow(CROWDS, slow=set(CROWDS) - {(0, True)}))
def test_crowded_requests_answer_by_their_greatest_length(
    crowd: tuple[int, bool], phi3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap_bytes, is_async = crowd
    monkeypatch.setattr(StepCosts, "swap_seconds", lambda *_: 0.0)  # whatever was measured
    engine = open_engine(
        phi3,
        tmp_path,
        kv_cache_bytes=30 * 4 * 2 * 2 * 2 * 16 * 4,
        swap_bytes=swap_bytes,
        max_model_len=LONGEST,
        max_num_seqs=12,
        max_num_batched_tokens=24,
        async_scheduling=is_async,
    )
    rng = random.Random(0)
    system = random_tokens(13)
    requests: dict[str, tuple[list[int], int]] = {}
    for _ in range(16):
        own = random_tokens(rng.randint(1, 20), seed=rng.randrange(99))
        prompt = [*(system if rng.random() < 0.6 else []), *own]
        max_tokens, group_id = rng.randint(1, 30), None
        if rng.random() < 0.2:
            group_id = str(len(requests))
        for _ in range(1 if group_id is None else 3):
            request_id = engine.submit(
                prompt, max_tokens=max_tokens, ignore_eos=True, group_id=group_id
            )
            requests[request_id] = prompt, max_tokens
        for _ in range(rng.randint(0, 2)):
            engine.step()
    engine.run()

    short, long = load_dense_for(phi3, BORDER), load_dense_for(phi3, LONGEST)
    is_long = {key: len(prompt) + most > BORDER for key, (prompt, most) in requests.items()}
    assert 3 < sum(is_long.values()) < len(requests) - 3
    for request_id, (prompt, _) in requests.items():
        dense = long if is_long[request_id] else short
        assert_greedy(dense, prompt, engine.answers[request_id].token_ids)
    stats = engine.core.stats()
    assert stats.num_preemptions > 0, "the blocks were meant to be too few"
    assert (engine.core.parts.scheduler.num_swaps > 0) == (swap_bytes > 0)
    assert stats.num_cached_tokens > 0, "the shared beginning was meant to be reused"
    engine.close()


@pytest.mark.parametrize("has_adapter", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_prefixes_are_shared_within_a_context_and_never_across(
    phi3: Path, tmp_path: Path, has_adapter: bool
) -> None:
    engine = open_engine(phi3, tmp_path)
    adapter = None
    if has_adapter:
        adapter = engine.add_adapter(make_adapter(phi3, tmp_path / "adapter", seed=1))

    def num_cached(max_tokens: int) -> int:
        request_id = engine.submit(PROMPT, adapter, max_tokens=max_tokens, ignore_eos=True)
        engine.run()
        started = engine.answers[request_id].started
        assert started is not None
        return started.num_cached_tokens

    room = BORDER - len(PROMPT)
    assert [num_cached(most) for most in (1, room + 1, room, 40)] == [0, 0, 8, 8]
    engine.close()


@pytest.mark.parametrize("length", [BORDER, BORDER + 1])
def test_prompts_are_read_with_the_frequencies_of_their_length(
    engine: LocalEngine, phi3: Path, length: int
) -> None:
    tokens, dense = random_tokens(length), load_dense_for(phi3, length)
    pooled = engine.submit(tokens, max_tokens=0, pooling=Pooling.MEAN)
    read = engine.submit(tokens, max_tokens=0, num_prompt_logprobs=0)
    engine.run()

    with torch.inference_mode():
        states = dense.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
    (embedding,) = (part.embedding for part in engine.answers[pooled].prompts if part.embedding)
    ours = torch.frombuffer(bytearray(embedding), dtype=torch.float32)
    assert (ours - states.mean(0)).abs().max() < TOLERANCE
    parts = engine.answers[read].prompts
    logprobs = torch.tensor([entry.chosen.logprob for part in parts for entry in part.logprobs])
    expected = logits_of(dense, tokens).log_softmax(-1)[:-1]
    expected = expected.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert (logprobs - expected).abs().max() < TOLERANCE


def test_a_prompt_whose_attention_is_observed_has_the_frequencies_of_its_length(
    engine: LocalEngine, phi3: Path
) -> None:
    tokens = random_tokens(60)
    request_id = engine.submit(tokens, max_tokens=1, kv_policy=KvPolicy(EvictionMethod.SNAPKV, 40))
    engine.run()
    answer = engine.answers[request_id].token_ids
    assert_greedy(load_dense_for(phi3, LONGEST), tokens, answer)


# --- draft tokens ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["draft", "early_exit"])
def test_drafts_have_the_frequencies_of_their_request(
    proposer: str, phi3: Path, tmp_path: Path
) -> None:
    """A draft model that is the base, and first layers after which nothing changes, are right
    unless their frequencies are wrong."""
    base = tmp_path / "base"
    shutil.copytree(phi3, base)
    weights = load_file(base / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.1.{name}.weight"].zero_()
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    speculation = (f"draft:{base}" if proposer == "draft" else "early_exit:1",)
    engine = open_engine(base, tmp_path, speculation=speculation)
    ids = [
        engine.submit(
            PROMPT, max_tokens=most, ignore_eos=True, speculation=SpeculationParams(num_tokens=4)
        )
        for most in (12, 40, 13, 60)
    ]
    engine.run()
    ends = [engine.answers[request_id].end for request_id in ids]
    assert all(end.num_draft_tokens > 5 for end in ends)
    assert [end.num_accepted_tokens for end in ends] == [end.num_draft_tokens for end in ends]
    for request_id, length in zip(ids, (BORDER - 1, LONGEST, BORDER, LONGEST), strict=True):
        answer = engine.answers[request_id].token_ids
        assert_greedy(load_dense_for(base, length), PROMPT, answer)
    engine.close()


# --- loading --------------------------------------------------------------------------------------


def config_of(max_position: int, **rope: Any) -> PreTrainedConfig:
    config = PreTrainedConfig()
    config.max_position_embeddings = max_position
    config.rope_parameters = rope
    return config


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 512}
OTHER_LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 1024}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
FIXED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("rope", "max_model_len", "contexts", "full"),
    [
        (LONGROPE, 4096, (512, 4096), 4096),
        (LONGROPE, 513, (512, 513), 4096),
        (LONGROPE, 512, (512,), 4096),
        ({"rope_type": "longrope"}, 4096, (4096,), 4096),
        (DYNAMIC, 8192, (4096, 8192), 8192),
        (DYNAMIC, 4096, (4096,), 8192),
        ({**DYNAMIC, "factor": None}, 4096, (4096,), 4096),
        ({**DYNAMIC, "alpha": 1000.0}, 4096, (4096,), 4096),
        (FIXED, 4096, (4096,), 4096),
        ({}, 4096, (4096,), 4096),
        ({"full_attention": LONGROPE, "sliding_attention": FIXED}, 4096, (512, 4096), 4096),
        (
            {"full_attention": LONGROPE, "sliding_attention": OTHER_LONGROPE},
            2048,
            (512, 1024, 2048),
            4096,
        ),
    ],
)
def test_contexts_are_the_lengths_at_which_frequencies_change(
    rope: dict[str, Any], max_model_len: int, contexts: tuple[int, ...], full: int
) -> None:
    config = config_of(4096, **rope)
    assert rotary_contexts(config, max_model_len=max_model_len).lengths == contexts
    assert full_context(config) == full


def test_the_settings_of_phi_4_mini_are_read_as_published() -> None:
    factors = {"short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
    config = AutoConfig.for_model(
        "phi3",
        num_attention_heads=24,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        partial_rotary_factor=0.75,
        rope_theta=10000.0,
        rope_scaling={"type": "longrope", **factors},
    )
    longest = full_context(config)
    assert rotary_contexts(config, max_model_len=longest).lengths == (4096, 131072)


def test_a_request_begins_where_the_first_context_that_holds_it_begins() -> None:
    contexts = RotaryContexts((4, 10, 30))
    lengths = (0, 1, 4, 5, 10, 11, 30, 31)
    assert [contexts.start(length) for length in lengths] == [0, 0, 0, 4, 4, 14, 14, 14]
    assert [RotaryContexts((30,)).start(length) for length in lengths] == [0] * len(lengths)


@pytest.mark.parametrize("case", ["phi3", pytest.param("llama-dynamic", marks=pytest.mark.slow)])
def test_the_full_context_is_served_unless_less_is_asked_for(case: str, tmp_path: Path) -> None:
    path = str(save(tmp_path, case))
    base = load_base_model(EngineConfig(path, device="cpu"))
    assert base.max_model_len == LONGEST
    assert base.rotary_contexts.lengths == (BORDER, LONGEST)
    assert base.rotary_bytes == (BORDER + LONGEST) * 16 * 2 * 4
    with pytest.raises(UnsupportedModel, match=f"exceeds the model's {LONGEST}"):
        load_base_model(EngineConfig(path, device="cpu", max_model_len=LONGEST + 1))
    short = load_base_model(EngineConfig(path, device="cpu", max_model_len=BORDER))
    assert (short.rotary_contexts.lengths, short.rotary_bytes) == ((BORDER,), 0)


def test_the_plan_says_what_happens_at_the_border(engine: LocalEngine) -> None:
    line = (
        f"Requests of up to {BORDER} tokens, prompt and max_tokens together, get the rotary "
        f"frequencies of that length; longer ones get those of {LONGEST}. "
        "Their tables take 0.0 MiB."
    )
    assert line in engine.core.parts.plan.lines


def test_a_model_whose_rotary_embedding_is_not_found_is_refused(phi3: Path) -> None:
    model = load_dense(phi3)
    model.model.rotary_emb.rope_type = "default"
    with pytest.raises(UnsupportedModel, match=f"give --max-model-len {BORDER}"):
        table_rotary(
            model,
            RotaryContexts((BORDER, LONGEST)),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
