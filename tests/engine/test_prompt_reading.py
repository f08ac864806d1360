"""Embeddings and prompt log-probabilities, compared with transformers and PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.config import Quantization
from loraplex.engine.execution.pooling import pool
from loraplex.engine.messages import FinishReason, Pooling
from loraplex.engine.model.forward import run_model
from loraplex.kernels.quantize import WeightFormat
from support import peft_features
from support.engine import LocalEngine
from support.families import SERVED, VOCAB_SIZE, save_family
from support.features import change_weights
from support.marks import marked_slow
from support.models import make_adapter
from support.quantized import rounded_weight

TOLERANCE = 1e-4
ENDS = (Quantization.NONE, Quantization.FP8)
"""How the embedding and the output head are quantized."""
FAMILIES = ("llama", "gemma2-softcap-window", "gpt2-conv1d", "granite", "opt", "cohere")


def tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


class Reference:
    """The same base and adapters, dense, as transformers and PEFT run them."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def _run(self, prompt: list[int], adapter: Path | None) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(self._base, attn_implementation="eager")
        if adapter:
            model = PeftModel.from_pretrained(model, adapter)
        with torch.inference_mode():
            return model.eval()(
                input_ids=torch.tensor([prompt]), use_cache=False, output_hidden_states=True
            )

    def states(self, prompt: list[int], adapter: Path | None = None) -> Tensor:
        """`[num_tokens, hidden_size]` behind the last layer and its norm."""
        states: Tensor = self._run(prompt, adapter).hidden_states[-1][0]
        return states

    def logprobs(self, prompt: list[int], adapter: Path | None = None) -> Tensor:
        """`[num_tokens, vocab_size]`."""
        logits: Tensor = self._run(prompt, adapter).logits[0]
        return logits.log_softmax(-1)


def embedding_of(engine: LocalEngine, request_id: str) -> Tensor:
    answer = engine.answers[request_id]
    assert answer.end.error is None
    assert answer.end.reason is FinishReason.LENGTH
    (found,) = [read.embedding for read in answer.prompts if read.embedding is not None]
    assert answer.token_ids == []
    return torch.from_numpy(np.frombuffer(found, np.float32).copy())


def check_logprobs(
    engine: LocalEngine, request_id: str, prompt: list[int], expected: Tensor, num_top: int
) -> None:
    entries = [entry for read in engine.answers[request_id].prompts for entry in read.logprobs]
    assert [entry.chosen.token_id for entry in entries] == prompt[1:]
    for entry, row in zip(entries, expected, strict=False):
        token_id = entry.chosen.token_id
        assert abs(entry.chosen.logprob - row[token_id].item()) < TOLERANCE
        assert entry.rank == 1 + int((row > row[token_id]).sum())
        assert len(entry.top) == num_top
        best = row.topk(num_top) if num_top else None
        if best is not None:
            found = torch.tensor([top.logprob for top in entry.top])
            assert (found - best.values).abs().max() < TOLERANCE


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its ends have values of fp8, so that quantizing them changes nothing."""
    path = save_family(tmp_path_factory.mktemp("base"), *SERVED["llama"])
    change_weights(path, _round_ends)
    return path


def _round_ends(name: str, parameter: Tensor) -> None:
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        parameter.copy_(rounded_weight(parameter, WeightFormat.FP8))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The second one changes the input embedding and the output head too."""
    folder = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(base)
    peft_features.make_adapter("dora", folder / "2", model, seed=2)
    return [make_adapter(base, folder / "1", seed=1, r=4), folder / "2"]


@pytest.fixture(params=marked_slow(ENDS, slow=ENDS[1:]))
def engine(base: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalEngine]:
    """Of small steps, so that prompts take several."""
    local = LocalEngine(
        base,
        tmp_path,
        embedding_quantization=request.param,
        max_num_batched_tokens=24,
        max_num_seqs=8,
        speculation=("ngram",),
    )
    yield local
    local.close()


def test_what_is_asked_of_prompts_beside_generation_equals_transformers_and_peft(
    base: Path, adapters: list[Path], engine: LocalEngine
) -> None:
    keys: list[AdapterKey | None] = [None, *map(engine.add_adapter, adapters)]
    folders = [None, *adapters]
    reference = Reference(base)
    asked: list[tuple[str, int, list[int], dict[str, Any]]] = []
    generated: list[tuple[str, int, list[int]]] = []
    for number in range(15):
        prompt = tokens(5 + 13 * number % 61, seed=number)
        which = number % 3
        kinds: list[dict[str, Any]] = [
            {"pooling": Pooling.LAST, "max_tokens": 0},
            {"pooling": Pooling.MEAN, "max_tokens": 0},
            {"num_prompt_logprobs": number % 4, "max_tokens": number % 2},
        ]
        kind = kinds[number // 3 % 3]
        asked.append((engine.submit(prompt, keys[which], **kind), which, prompt, kind))
        generated.append((engine.submit(prompt, keys[which], max_tokens=6), which, prompt))
    engine.run()
    for request_id, which, prompt, kind in asked:
        pooling = kind.get("pooling")
        if pooling is None:
            expected = reference.logprobs(prompt, folders[which])
            check_logprobs(engine, request_id, prompt, expected, kind["num_prompt_logprobs"])
            continue
        states = reference.states(prompt, folders[which])
        vector = states[-1] if pooling is Pooling.LAST else states.mean(0)
        assert (embedding_of(engine, request_id) - vector).abs().max() < TOLERANCE
    for request_id, which, prompt in generated:
        alone = engine.generate(prompt, keys[which])[:6]
        assert engine.answers[request_id].token_ids == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_of_many_families_equal_transformers(family: str, tmp_path: Path) -> None:
    base = save_family(tmp_path / "base", *SERVED[family])
    engine = LocalEngine(base, tmp_path, max_num_batched_tokens=24, max_num_seqs=8)
    reference = Reference(base)
    prompts = [tokens(length, seed=length) for length in (1, 17, 40)]
    ids = [
        [engine.submit(prompt, pooling=pooling, max_tokens=0) for prompt in prompts]
        for pooling in (Pooling.LAST, Pooling.MEAN)
    ]
    engine.run()
    for prompt, last, mean in zip(prompts, *ids, strict=True):
        states = reference.states(prompt)
        assert (embedding_of(engine, last) - states[-1]).abs().max() < TOLERANCE
        assert (embedding_of(engine, mean) - states.mean(0)).abs().max() < TOLERANCE
        assert engine.core.info.embedding_size == states.shape[-1]
    engine.close()


def test_the_last_token_is_read_behind_a_cached_prefix_and_whole_prompts_are_not(
    engine: LocalEngine, base: Path
) -> None:
    prompt = tokens(50, seed=1)
    engine.generate(prompt)
    last = engine.submit(prompt, pooling=Pooling.LAST, max_tokens=0)
    mean = engine.submit(prompt, pooling=Pooling.MEAN, max_tokens=0)
    scored = engine.submit(prompt, num_prompt_logprobs=0, max_tokens=1)
    engine.run()
    found = [engine.answers[name].started for name in (last, mean, scored)]
    assert [started.num_cached_tokens for started in found if started] == [48, 0, 0]
    states = Reference(base).states(prompt)
    assert (embedding_of(engine, last) - states[-1]).abs().max() < TOLERANCE
    assert (embedding_of(engine, mean) - states.mean(0)).abs().max() < TOLERANCE
    check_logprobs(engine, scored, prompt, Reference(base).logprobs(prompt), 0)


@pytest.mark.parametrize("swap_bytes", [0, 1 << 20])
def test_a_preempted_prompt_is_read_once(base: Path, tmp_path: Path, swap_bytes: int) -> None:
    engine = LocalEngine(
        base,
        tmp_path,
        max_num_batched_tokens=24,
        max_num_seqs=8,
        max_model_len=96,
        kv_cache_bytes=96 * 4 * 2 * 2 * 16 * 4 * 3 // 2,
        swap_bytes=swap_bytes,
        tenant_cap=0.5,
    )
    reference = Reference(base)
    prompts = [tokens(60, seed=number) for number in range(6)]
    ids = [
        engine.submit(
            prompt,
            tenant_id=f"t{number % 3}",
            num_prompt_logprobs=1,
            max_tokens=30,
            ignore_eos=True,
        )
        for number, prompt in enumerate(prompts)
    ]
    means = [
        engine.submit(prompt, tenant_id=f"t{number % 3}", pooling=Pooling.MEAN, max_tokens=0)
        for number, prompt in enumerate(prompts)
    ]
    engine.run()
    assert engine.core.stats().num_preemptions > 0, "the test must be able to fail"
    for prompt, scored, mean in zip(prompts, ids, means, strict=True):
        check_logprobs(engine, scored, prompt, reference.logprobs(prompt), 1)
        expected = reference.states(prompt).mean(0)
        assert (embedding_of(engine, mean) - expected).abs().max() < TOLERANCE
    engine.close()


def test_no_step_computes_more_logits_than_were_planned_for(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def noting(*args: Any) -> Tensor:
        logits = run_model(*args)
        sizes.append(len(logits))
        return logits

    monkeypatch.setattr("loraplex.engine.execution.runner.run_model", noting)
    engine = LocalEngine(base, tmp_path, max_num_batched_tokens=200, max_num_seqs=4)
    limits = engine.core.parts.scheduler.limits
    object.__setattr__(limits, "max_read_rows", 32)
    prompts = [tokens(90, seed=number) for number in range(4)]
    ids = [engine.submit(prompt, num_prompt_logprobs=0, max_tokens=4) for prompt in prompts]
    engine.run()
    assert max(sizes) <= 32 + 4
    reference = Reference(base)
    for request_id, prompt in zip(ids, prompts, strict=True):
        check_logprobs(engine, request_id, prompt, reference.logprobs(prompt), 0)
    engine.close()


def test_choices_of_a_prompt_go_on_from_the_one_that_reads_it(engine: LocalEngine) -> None:
    prompt = tokens(40, seed=9)
    ids = [
        engine.submit(
            prompt,
            group_id="g",
            num_prompt_logprobs=0 if choice == 0 else None,
            max_tokens=4,
            ignore_eos=True,
        )
        for choice in range(3)
    ]
    engine.run()
    cached = [engine.answers[name].started for name in ids]
    assert [started.num_cached_tokens for started in cached if started] == [0, 39, 39]
    assert len({tuple(engine.answers[name].token_ids) for name in ids}) == 1
    assert [len(engine.answers[name].prompts) > 0 for name in ids] == [True, False, False]


def test_an_embedding_that_is_not_finite_ends_its_request_alone(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(40, seed=3)
    spoilt = engine.submit(prompt, pooling=Pooling.MEAN, max_tokens=0)
    good = engine.submit(prompt, pooling=Pooling.MEAN, max_tokens=0)

    def spoiling(request: Any, states: Tensor, head: None) -> bytes | None:
        return pool(request, states * float("inf") if request.request_id == spoilt else states)

    monkeypatch.setattr("loraplex.engine.execution.prompt_reading.pool", spoiling)
    engine.run()
    error = engine.answers[spoilt].end.error
    assert error is not None
    assert error.code == "numerical_error"
    assert embedding_of(engine, good).isfinite().all()


@pytest.mark.parametrize(
    "asked",
    [
        {"pooling": Pooling.LAST, "max_tokens": 1},
        {"pooling": Pooling.LAST, "max_tokens": 0, "num_prompt_logprobs": 0},
        {"num_prompt_logprobs": 21},
        {"num_prompt_logprobs": -1},
    ],
)
def test_what_cannot_be_asked_is_refused(engine: LocalEngine, asked: dict[str, Any]) -> None:
    request_id = engine.submit([1, 2, 3], **asked)
    engine.run()
    error = engine.answers[request_id].end.error
    assert error is not None
    assert error.code == "invalid_parameter"


def test_a_request_without_output_ends_with_its_prompt(engine: LocalEngine) -> None:
    request_id = engine.submit(tokens(30, seed=5), max_tokens=0)
    engine.run()
    answer = engine.answers[request_id]
    assert (answer.end.reason, answer.token_ids) == (FinishReason.LENGTH, [])
    assert answer.prompts == []
