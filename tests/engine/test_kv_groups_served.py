"""The whole engine with keys and values in 4 and 2 bits.

What a query reads depends on positions only. So a request's answer is the same alone and in a
crowd, after a prefix hit, a fork, a preemption, and with draft tokens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM

from loraplex.engine.config import TREE_PROPOSERS, EngineConfig, KvDtype
from loraplex.engine.errors import InvalidParameter, UnsupportedModel
from loraplex.engine.kv.cache import choose_kv_format
from loraplex.engine.messages import SpeculationParams
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.scheduling.step_costs import StepCosts
from support import paged
from support.engine import LocalEngine
from support.families import SERVED, VOCAB_SIZE, save_family
from support.greedy import parts_at_near_tie
from support.marks import marked_slow

BLOCK_SIZE = 8
DEMO_BASE = Path(__file__).parents[2] / "api" / "demo" / "weights" / "base"
NEAR_TIE = 0.05
"""Logit gap that another order of summation may cross: rounding to codes magnifies it."""
MAX_NEAR_TIES = 2
FORMATS = [KvDtype.INT4, KvDtype.INT2]
CASES: Mapping[str, Mapping[str, object]] = {
    "llama": {},
    "mistral-window": {},
    "gemma2-softcap-window": {},
    "gpt_oss-sinks-window": {},
    "operators-window": {"attention_window": 21, "attention_sinks": 2},
}
SLOW_CASES = set(CASES) - {"llama"}


def test_latents_are_not_quantized_in_groups(tmp_path: Path) -> None:
    config = EngineConfig(
        str(base_of("deepseek_v2-mla", tmp_path)), device="cpu", kv_dtype=KvDtype.INT4
    )
    with pytest.raises(UnsupportedModel, match="multi-head latent attention"):
        load_base_model(config)


def open_engine(path: Path, blocks: Path, kv_dtype: KvDtype, **config: object) -> LocalEngine:
    settings = {"kv_block_size": BLOCK_SIZE, "max_model_len": 160, **config}
    return LocalEngine(path, blocks, kv_dtype=kv_dtype, **settings)


def base_of(case: str, folder: Path) -> Path:
    return save_family(folder / "model", *SERVED[case if case in SERVED else "llama"])


def answer_alone(
    engine: LocalEngine, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]
) -> list[list[int]]:
    """Each request's answer with nothing beside it."""
    answers = []
    for prompt, count in zip(prompts, max_tokens, strict=True):
        request_id = engine.submit(prompt, max_tokens=count, ignore_eos=True)
        engine.run()
        answers.append(engine.answers[request_id].token_ids)
    return answers


def assert_same(
    alone: LocalEngine,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    actual: Sequence[Sequence[int]],
) -> None:
    num_ties = 0
    for prompt, ours, theirs in zip(prompts, actual, expected, strict=True):
        if ours != theirs:
            assert parts_at_near_tie(
                alone, prompt, None, expected=theirs, actual=ours, gap=NEAR_TIE
            )
            num_ties += 1
    assert num_ties <= MAX_NEAR_TIES


def draw_prompts(rng: random.Random, count: int) -> list[list[int]]:
    system = [rng.randrange(VOCAB_SIZE) for _ in range(2 * BLOCK_SIZE + 1)]
    prompts = []
    for _ in range(count):
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
        prompts.append([*(system if rng.random() < 0.5 else []), *own])
    return prompts


@pytest.mark.parametrize("swap_bytes", marked_slow([1 << 20, 0], slow={0}))
@pytest.mark.parametrize("case", marked_slow(CASES, slow=SLOW_CASES))
def test_a_crowded_sequence_answers_as_it_does_alone(
    case: str, swap_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCosts, "swap_seconds", lambda *_: 0.0)  # whatever was measured
    path = base_of(case, tmp_path)
    rng = random.Random(0)
    prompts = draw_prompts(rng, 14)
    max_tokens = [rng.randint(1, 24) for _ in prompts]
    alone = open_engine(path, tmp_path, KvDtype.INT4, prefix_caching=False, **CASES[case])
    expected = answer_alone(alone, prompts, max_tokens)
    open_bytes = (1 + 2 * 12 + 24 // BLOCK_SIZE) * open_block_bytes(alone)
    few = open_bytes + 13 * sum(alone.core.parts.plan.kv_block_bytes)
    crowded = open_engine(
        path,
        tmp_path,
        KvDtype.INT4,
        kv_cache_bytes=few,
        swap_bytes=swap_bytes,
        max_num_seqs=12,
        max_num_batched_tokens=24,
        **{**CASES[case], "max_model_len": 66},
    )
    ids = []
    for prompt, count in zip(prompts, max_tokens, strict=True):
        ids.append(crowded.submit(prompt, max_tokens=count, ignore_eos=True))
        for _ in range(rng.randint(0, 2)):
            crowded.step()
            check_integrity(crowded)
    crowded.run()
    assert_same(alone, prompts, expected, crowded.tokens(ids))
    stats = crowded.core.stats()
    assert stats.num_preemptions > 0, "the pool was meant to be too small"
    if not swap_bytes:
        assert crowded.core.parts.scheduler.num_swaps == 0
    elif case == "llama":  # a window may have freed what a complete block would read
        assert crowded.core.parts.scheduler.num_swaps > 0
    assert stats.num_cached_tokens > 0, "the shared beginning was meant to be reused"
    assert stats.num_free_kv_blocks == crowded.core.info.num_kv_blocks, "blocks leaked"
    check_integrity(crowded)
    for engine in (alone, crowded):
        engine.close()


def open_block_bytes(engine: LocalEngine) -> int:
    """Bytes of an open block in every group: fp32 keys and values."""
    shapes = engine.core.parts.base.kv_shapes
    return sum(BLOCK_SIZE * s.num_heads * (s.key_dim + s.value_dim) * 4 for s in shapes)


def check_integrity(engine: LocalEngine) -> None:
    requests = engine.core.parts.scheduler.requests()
    engine.core.parts.kv.check_integrity(request.kv for request in requests)
    for group in engine.core.parts.kv.groups:
        assert group.open is not None


@pytest.mark.slow
@pytest.mark.parametrize("length", [5, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE - 1])
def test_forks_answer_as_requests_of_their_own(length: int, tmp_path: Path) -> None:
    """Also if the parent has completed the block in which a fork begins."""
    path = base_of("llama", tmp_path)
    prompt = [random.Random(1).randrange(VOCAB_SIZE) for _ in range(length)]
    sampling: dict[str, Any] = {"max_tokens": 14, "ignore_eos": True, "temperature": 1.0}
    alone = open_engine(path, tmp_path, KvDtype.INT4, prefix_caching=False)
    expected = []
    for seed in range(4):
        request_id = alone.submit(prompt, seed=seed, **sampling)
        alone.run()
        expected.append(alone.answers[request_id].token_ids)
    forking = open_engine(path, tmp_path, KvDtype.INT4, max_num_seqs=3)
    ids = [forking.submit(prompt, seed=seed, group_id="g", **sampling) for seed in range(4)]
    forking.run()
    assert forking.tokens(ids) == expected
    if length % BLOCK_SIZE:
        assert forking.core.parts.scheduler.num_forks > 0
    check_integrity(forking)
    for engine in (alone, forking):
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("speculation", ["ngram", "early_exit:1", "draft"])
def test_draft_tokens_do_not_change_the_answer(
    speculation: str, kv_dtype: KvDtype, tmp_path: Path
) -> None:
    path = base_of("llama", tmp_path)
    if speculation == "draft":
        speculation = f"draft:{path}"
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(6)] * 3 for _ in range(3)]
    counts = [30] * len(prompts)
    plain = open_engine(path, tmp_path, kv_dtype, prefix_caching=False)
    expected = answer_alone(plain, prompts, counts)
    engine = open_engine(path, tmp_path, kv_dtype, speculation=(speculation,))
    ids = [
        engine.submit(
            prompt,
            max_tokens=30,
            ignore_eos=True,
            speculation=SpeculationParams(num_tokens=rng.randint(3, 11)),
        )
        for prompt in prompts
    ]
    engine.run()
    assert_same(plain, prompts, expected, engine.tokens(ids))
    ends = [engine.answers[request_id].end for request_id in ids]
    drafted, accepted = (
        sum(getattr(end, name) for end in ends)
        for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    assert 0 < accepted < drafted, "some were meant to be rejected"
    for each in (plain, engine):
        each.close()


@pytest.mark.slow
def test_a_step_may_be_in_flight(tmp_path: Path) -> None:
    path = base_of("llama", tmp_path)
    rng = random.Random(3)
    prompts = draw_prompts(rng, 12)
    counts = [rng.randint(10, 40) for _ in prompts]
    alone = open_engine(path, tmp_path, KvDtype.INT4, prefix_caching=False)
    expected = answer_alone(alone, prompts, counts)
    engine = open_engine(path, tmp_path, KvDtype.INT4, max_num_seqs=4, async_scheduling=True)
    ids = [
        engine.submit(prompt, max_tokens=count, ignore_eos=True)
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    engine.run()
    assert_same(alone, prompts, expected, engine.tokens(ids))
    for each in (alone, engine):
        each.close()


@pytest.mark.parametrize("bits", [4, 2])
def test_the_logits_are_those_of_a_forward_over_kivis_codes(bits: int, tmp_path: Path) -> None:
    """transformers' own forward of the whole text, with an attention that quantizes the keys and
    values of complete blocks by KIVI's formula: in fp32, and with steps in 16 bits as served."""
    path = base_of("llama", tmp_path)
    base = load_base_model(
        EngineConfig(
            str(path), device="cpu", kv_dtype=KvDtype(f"int{bits}"), kv_block_size=paged.BLOCK_SIZE
        )
    )
    rng = random.Random(4)
    texts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (41, 22, 3)]
    served = paged.paged_logits(base, texts)
    dense = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    plain = all_logits(dense, texts)
    codes = []
    for rounds in (False, True):
        name = f"kivi{bits}-{rounds}"
        AttentionInterface.register(name, partial(kivi_attention, bits, rounds))
        dense.set_attn_implementation(name)
        codes.append(all_logits(dense, texts))
    exact, rounded = codes
    effect = difference(exact, plain)
    assert difference(served, rounded) < effect / 50
    assert difference(served, plain) < effect * 1.3, "rounded steps lose little"
    assert torch.allclose(served[2], plain[2], atol=1e-4), "a block that is not complete"


def all_logits(dense: Any, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    with torch.inference_mode():
        return [dense(torch.tensor([text]), use_cache=False).logits[0] for text in texts]


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max((left - right).abs().mean().item() for left, right in pairs)


def bf16_below(exact: Tensor) -> Tensor:
    """The largest number in bf16, as fp32, that is not above the exact one."""
    whole = exact.contiguous().view(torch.int32)
    towards_zero = whole & ~0xFFFF
    is_above = (exact < 0) & (towards_zero != whole)
    return torch.where(is_above, towards_zero + 0x10000, towards_zero).view(torch.float32)


def kivi_attention(
    bits: int,
    rounds: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float = 1.0,
    **_: object,
) -> tuple[Tensor, None]:
    """`query [1, heads, tokens, dim]`: every token sees its own block as it is."""
    size, num_tokens = paged.BLOCK_SIZE, query.shape[2]
    num_shared = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(num_shared, 1) for part in (key, value))
    codes = []
    for part, axis in ((key, 3), (value, 4)):
        num_full = num_tokens // size
        blocks = part[:, :, : num_full * size].unflatten(2, (num_full, size))
        lowest = blocks.amin(axis, keepdim=True)
        lowest = bf16_below(lowest) if rounds else lowest
        step = (blocks.amax(axis, keepdim=True) - lowest) / (2**bits - 1)
        step = -bf16_below(-step) if rounds else step
        read = ((blocks - lowest) / step).round() * step + lowest
        codes.append(torch.cat([read.flatten(2, 3), part[:, :, num_full * size :]], 2))
    block = torch.arange(num_tokens) // size
    is_own = block[:, None] == block
    scores = torch.where(is_own, query @ key.mT, query @ codes[0].mT) * scaling
    scores = scores.masked_fill(~torch.ones_like(is_own).tril(), float("-inf"))
    weights = scores.softmax(-1)
    out = (weights * is_own) @ value + (weights * ~is_own) @ codes[1]
    return out.transpose(1, 2), None


@pytest.mark.slow
def test_the_error_is_told_at_load_and_grows_with_fewer_bits(tmp_path: Path) -> None:
    errors = []
    for kv_dtype in (KvDtype.INT8, *FORMATS):
        engine = LocalEngine(
            DEMO_BASE, tmp_path, kv_dtype=kv_dtype, kv_cache_bytes=32 << 20, max_num_seqs=4
        )
        plan = engine.core.info.memory_plan
        assert any(f"KV cache in {kv_dtype}: changes logits by" in line for line in plan)
        if kv_dtype.quantizes_blocks:
            assert engine.core.info.kv_block_size == 64
            assert any("unfinished KV blocks" in line for line in plan)
        errors.append(engine.core.parts.base.kv_error)
        engine.close()
    int8, int4, int2 = errors
    assert 0 < int8 < int4 / 2 < int4 < int2
    assert int4 < 0.3
    assert int2 < 1.0


def test_draft_trees_are_refused_and_every_device_computes_the_formats() -> None:
    for kv_dtype in FORMATS:
        for device in ("cpu", "cuda"):
            found = choose_kv_format(kv_dtype, dtype=torch.bfloat16, device=torch.device(device))
            assert found == (torch.bfloat16, torch.uint8, int(kv_dtype.removeprefix("int")))
        for name in TREE_PROPOSERS:
            with pytest.raises(InvalidParameter, match=name):
                EngineConfig("m", kv_dtype=kv_dtype, speculation=(f"{name}:heads",))
    assert EngineConfig("m").kv_block_size == 16
    assert EngineConfig("m", kv_dtype=KvDtype.INT4).kv_block_size == 64
    assert EngineConfig("m", kv_dtype=KvDtype.INT4, kv_block_size=32).kv_block_size == 32
