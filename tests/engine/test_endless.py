"""Outputs beyond the context length, where windows, sinks and states bound the KV cache.

The reference is transformers' own forward pass over the whole sequence, with a mask of the same
window and sinks, which knows neither blocks nor places.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from loraplex.engine.messages import FinishReason
from support.engine import LocalEngine
from support.families import SERVED, STATES, VOCAB_SIZE, save_family
from support.models import make_adapter

CONTEXT, BLOCK_SIZE = 64, 8
NUM_TOKENS = 150
TARGETS = {"bloom-slopes": ["query_key_value"], "mamba2": ["in_proj"]}
PROMPT = [random.Random(0).randrange(3, VOCAB_SIZE) for _ in range(20)]


def open_engine(base: Path, blocks: Path, **config: object) -> LocalEngine:
    settings = {
        "dtype": "float32",
        "max_model_len": CONTEXT,
        "kv_block_size": BLOCK_SIZE,
        "num_threads": 1,
        **config,
    }
    return LocalEngine(base, blocks, **settings)


def submit(engine: LocalEngine, prompt: list[int] = PROMPT, *args: Any, **settings: Any) -> str:
    settings = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "is_endless": True, **settings}
    return engine.submit(prompt, *args, **settings)


def additive_mask(num_tokens: int, window: int, sinks: int) -> torch.Tensor:
    query, key = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)
    visible = (key <= query) & ((key > query - window) | (key < sinks))
    return torch.zeros(1, 1, num_tokens, num_tokens).masked_fill(~visible, float("-inf"))


def assert_greedy(base: Path, prompt: list[int], output: list[int], **inputs: Any) -> None:
    """Every token is the likeliest one after those before it, for transformers' dense model."""
    dense = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
    tokens = [*prompt, *output]
    with torch.inference_mode():
        logits = dense(torch.tensor([tokens]), use_cache=False, **inputs).logits[0]
    rows = logits[len(prompt) - 1 : -1]
    chosen = rows.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert (rows.max(dim=1).values - chosen).max() < 1e-3


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("llama", {"attention_window": 24, "attention_sinks": 0}),
        pytest.param("mistral-window", {}, marks=pytest.mark.slow),
        *(
            pytest.param(
                case, {"attention_window": 24, "attention_sinks": 0}, marks=pytest.mark.slow
            )
            for case in ("gemma3-window", "gpt_oss-sinks-window")
        ),
    ],
)
def test_an_output_far_beyond_the_context_is_that_of_the_dense_model(
    case: str, config: dict[str, object], tmp_path: Path
) -> None:
    base = save_family(tmp_path / "base", *SERVED[case])
    engine = open_engine(base, tmp_path, **config)
    answer = engine.answers[submit(engine)]
    engine.run()
    assert answer.end.reason is FinishReason.LENGTH
    assert len(answer.token_ids) == NUM_TOKENS > 2 * CONTEXT
    total = len(PROMPT) + NUM_TOKENS
    masks: dict[str, Any] = {}
    if config:
        full = additive_mask(total, 24, 0)
        masks["attention_mask"] = full
        if case != "llama":
            sliding = additive_mask(total, 8, 0)
            masks["attention_mask"] = {"full_attention": full, "sliding_attention": sliding}
    assert_greedy(base, PROMPT, answer.token_ids, **masks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("mistral-window", {"kv_dtype": "int8"}),
        pytest.param("mistral-window", {"kv_dtype": "int4"}, marks=pytest.mark.slow),
        ("mistral-window", {"speculation": ("ngram",)}),
        pytest.param("mistral-window", {"async_scheduling": True}, marks=pytest.mark.slow),
        pytest.param(
            "bloom-slopes",
            {"attention_window": 24, "attention_sinks": 0},
            marks=pytest.mark.slow,
        ),
        ("jamba", {"attention_window": 24, "attention_sinks": 3}),
        ("mamba2", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_an_output_is_that_of_a_context_that_holds_it(
    case: str, config: dict[str, object], tmp_path: Path
) -> None:
    """The larger context is never left, so no table there loses its first entries."""
    base = save_family(tmp_path / "base", *{**SERVED, **STATES}[case])
    targets = {"target_modules": TARGETS[case]} if case in TARGETS else {}
    adapter = make_adapter(base, tmp_path / "adapter", seed=1, scale=0.1, **targets)
    outputs = []
    for context in (256, CONTEXT):
        engine = open_engine(base, tmp_path, **{**config, "max_model_len": context})
        key = engine.add_adapter(adapter)
        ids = [
            submit(engine, PROMPT, [key, None][index], temperature=float(index), seed=index)
            for index in range(2)
        ]
        engine.run()
        outputs.append(engine.tokens(ids))
        if config.get("speculation"):
            assert all(engine.answers[each].end.num_draft_tokens > 0 for each in ids)
    assert outputs[0] == outputs[1]
    assert all(len(output) == NUM_TOKENS for output in outputs[0])


@pytest.mark.slow
@pytest.mark.parametrize("swap_bytes", [0, 4 << 20])
@pytest.mark.parametrize("case", ["mistral-window", "mamba2"])
def test_a_preempted_output_goes_on_beyond_the_context(
    case: str, swap_bytes: int, tmp_path: Path
) -> None:
    base = save_family(tmp_path / "base", *{**SERVED, **STATES}[case])
    engine = open_engine(base, tmp_path, swap_bytes=swap_bytes, max_num_seqs=1)
    alone = engine.answers[submit(engine)]
    engine.run()
    scheduler = engine.core.parts.scheduler
    request_id = submit(engine)
    while len(engine.answers[request_id].token_ids) < 120:
        engine.step()
    running = scheduler.get(request_id)
    assert running is not None
    assert running.kv.num_evicted > 0
    submit(engine, max_tokens=2, priority=-1)
    engine.run()
    assert scheduler.num_preemptions == 1
    assert scheduler.num_swaps == (1 if swap_bytes else 0)
    assert engine.answers[request_id].token_ids == alone.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mistral-window", "mamba2"])
def test_what_a_request_holds_stays_the_same(case: str, tmp_path: Path) -> None:
    base = save_family(tmp_path / "base", *{**SERVED, **STATES}[case])
    engine = open_engine(base, tmp_path, prefix_caching=False)
    request_id = submit(engine, max_tokens=300)
    peaks: list[tuple[int, int]] = []
    kv = engine.core.parts.kv
    while engine.core.has_work:
        engine.step()
        if request := engine.core.parts.scheduler.get(request_id):
            num_held = sum(group.num_held(request.kv) for group in kv.groups)
            peaks.append((num_held, max(map(len, request.kv.tables))))
    assert len(engine.answers[request_id].token_ids) == 300
    first, rest = peaks[: 2 * CONTEXT], peaks[2 * CONTEXT :]
    assert max(held for held, _ in rest) <= max(held for held, _ in first) <= 4
    assert max(width for _, width in peaks) <= CONTEXT // BLOCK_SIZE + 1
    assert all(kv.num_free(group.index) == kv.num_usable(group.index) for group in kv.groups)


@pytest.mark.parametrize(
    ("case", "config", "reason"),
    [
        ("llama", {}, "attend to all tokens"),
        ("llama", {"attention_window": 24}, "--attention-sinks 0 serves it"),
        pytest.param(
            "bloom-slopes",
            {"attention_window": 24},
            "--attention-sinks 0 serves it",
            marks=pytest.mark.slow,
        ),
        ("llama", {"attention_window": 60, "attention_sinks": 0}, "too close"),
        ("gpt2-conv1d", {"attention_window": 24, "attention_sinks": 0}, "absolute positions"),
        pytest.param(
            "opt",
            {"attention_window": 24, "attention_sinks": 0},
            "absolute positions",
            marks=pytest.mark.slow,
        ),
        ("llama4-chunks", {"attention_window": 24, "attention_sinks": 0}, "chunks"),
    ],
)
def test_a_base_that_cannot_go_on_says_why(
    case: str, config: dict[str, object], reason: str, tmp_path: Path
) -> None:
    base = save_family(tmp_path / "base", *SERVED[case])
    engine = open_engine(base, tmp_path, **config)
    answers = engine.answers[submit(engine)], engine.answers[submit(engine, max_tokens=8)]
    within = engine.answers[submit(engine, max_tokens=8, is_endless=False)]
    engine.run()
    for answer in answers:
        error = answer.end.error
        assert error is not None
        assert error.code == "endless_not_served"
        assert reason in error.message
    assert len(within.token_ids) == 8


def test_the_prompt_must_fit_and_only_a_request_that_says_so_goes_on(tmp_path: Path) -> None:
    base = save_family(tmp_path / "base", *SERVED["mistral-window"])
    engine = open_engine(base, tmp_path)
    refused = [
        submit(engine, is_endless=False),
        submit(engine, PROMPT * 4, max_tokens=4),
        submit(engine, (PROMPT * 4)[:CONTEXT], max_tokens=4),
    ]
    served = submit(engine, (PROMPT * 4)[: CONTEXT - 1], max_tokens=40)
    engine.run()
    for request_id in refused:
        error = engine.answers[request_id].end.error
        assert error is not None
        assert error.code == "context_length_exceeded"
    assert len(engine.answers[served].token_ids) == 40
    assert_greedy(base, (PROMPT * 4)[: CONTEXT - 1], engine.answers[served].token_ids)
