"""Models with states (linear attention, state spaces, convolutions), against transformers and
PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraplex.engine.config import EngineConfig, KvDtype
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.scheduling.step_costs import StepCosts
from support.engine import LocalEngine
from support.families import STATES, VOCAB_SIZE, save_family
from support.greedy import assert_greedy, load_dense
from support.marks import marked_slow
from support.models import make_adapter
from support.peft_parity import check_against_peft
from support.ranks import followers_as_threads
from support.served_crowd import check_crowd, crowded_engine, serve_crowd

UNTIED = {"tie_word_embeddings": False}
"""A random model with tied embeddings repeats its last token, whatever its states say."""
SAMPLE = ("falcon_h1", "jamba", "lfm2", "qwen3_next")
"""`make base-evidence` tries all, with adapters and in crowds."""
LEFT_OUT = dict.fromkeys(SAMPLE, (".mlp.",)) | {"falcon_h1": (".out_proj", ".mlp.")}
"""Layers without adapters here: MLPs, which other tests have, and what PEFT refuses."""
CROWDS = [("qwen3_next", 1 << 20, True), ("qwen3_next", 0, False), ("mamba2", 1 << 20, False)]
"""Case, bytes of swap space, and whether the next step is scheduled while one runs."""
BLOCK_SIZE = 4


def save(path: Path, case: str) -> Path:
    model_type, differences = STATES[case]
    return save_family(path, model_type, {**differences, **UNTIED})


def load(path: Path) -> BaseModel:
    return load_base_model(EngineConfig(str(path), device="cpu"))


@pytest.mark.parametrize("case", marked_slow(SAMPLE, slow={"jamba"}))
def test_adapters_on_layers_with_states_equal_peft_in_one_mixed_batch(
    case: str, tmp_path: Path
) -> None:
    model = save(tmp_path / "base", case)
    targets = [part.name for fused in load(model).projections for part in fused.projection.slices]
    targets = [name for name in targets if not any(part in name for part in LEFT_OUT[case])]
    folders = [
        make_adapter(
            model, tmp_path / f"{rank}", seed=rank, scale=0.1, r=rank, target_modules=chosen
        )
        for rank, chosen in ((3, targets), (8, targets[:2]))
    ]
    check_against_peft(model, folders, tmp_path)


@pytest.mark.parametrize("crowd", marked_slow(CROWDS, slow=CROWDS[1:]))
def test_crowded_sequences_answer_as_the_models_own_forward(
    crowd: tuple[str, int, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, swap_bytes, is_async = crowd
    monkeypatch.setattr(StepCosts, "swap_seconds", lambda *_: 0.0)  # whatever was measured
    path = save(tmp_path / "model", case)
    engine = crowded_engine(path, tmp_path, swap_bytes=swap_bytes, is_async=is_async)
    asked = serve_crowd(engine)
    check_crowd(engine, asked, {None: load_dense(path)})
    engine.close()


@pytest.mark.slow
def test_ranks_answer_crowded_sequences_as_the_models_own_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank holds all states, and a part of the attention and of the experts."""
    monkeypatch.setattr(StepCosts, "swap_seconds", lambda *_: 0.0)
    path = save(tmp_path / "model", "qwen3_next")
    with followers_as_threads():
        engine = crowded_engine(path, tmp_path, swap_bytes=1 << 20, num_ranks=2)
        asked = serve_crowd(engine)
        check_crowd(engine, asked, {None: load_dense(path)})
        engine.close()


def test_a_step_that_failed_midway_leaves_states_as_they_were(tmp_path: Path) -> None:
    path = save(tmp_path / "model", "qwen3_next")
    engine = LocalEngine(path, tmp_path, kv_block_size=BLOCK_SIZE, max_num_seqs=3)
    prompts = [[5, 17, 90, 3, 44] * 3, [77, 8], [6, 61, 62]]
    ids = [engine.submit(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts]
    failures = iter([False] * 6 + [True, False, True, False])
    last = engine.core.parts.base.model.model.layers[-1]

    def fail(*_: Any) -> None:
        if next(failures, False):
            raise RuntimeError("no memory")

    last.register_forward_pre_hook(fail)
    engine.run()

    assert next(failures, None) is None, "the step was meant to fail"
    dense = load_dense(path)
    answers = engine.tokens(ids)
    assert sorted(map(len, answers)) == [6, 12, 12], "one of them was blamed"
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_greedy(dense, prompt, answer)
    engine.close()


def test_a_prompt_is_reused_up_to_its_last_full_block_and_the_rest_computed(tmp_path: Path) -> None:
    path = save(tmp_path / "model", "falcon_h1")
    engine = LocalEngine(path, tmp_path, kv_block_size=BLOCK_SIZE)
    prompt = [7 * index % VOCAB_SIZE for index in range(19)]
    first = engine.submit(prompt, max_tokens=8, ignore_eos=True)
    engine.run()
    again = engine.submit([*prompt, 9, 10, 11], max_tokens=8, ignore_eos=True)
    other = engine.submit(prompt, max_tokens=8, ignore_eos=True, tenant_id="globex")
    engine.run()

    started = [engine.answers[request_id].started for request_id in (again, other)]
    assert [each.num_cached_tokens for each in started if each] == [16, 0], "a tenant's own"
    assert engine.tokens([first]) == engine.tokens([other])
    assert_greedy(load_dense(path), [*prompt, 9, 10, 11], engine.answers[again].token_ids)
    engine.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"speculation": ("skip:1",)},
            "speculation is not supported for a model with states",
        ),
        (
            {"speculation": ("early_exit:1",)},
            "speculation is not supported for a model with states",
        ),
        ({"kv_dtype": KvDtype.INT4}, "int4 is not supported for a model with states"),
    ],
)
def test_what_states_cannot_do_is_refused_by_name(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = save(tmp_path, "lfm2")
    with pytest.raises(UnsupportedModel, match=said):
        load_base_model(EngineConfig(str(path), device="cpu", **options))


def test_the_default_speculation_rests_and_the_operator_is_told(tmp_path: Path) -> None:
    path = save(tmp_path / "model", "lfm2")
    engine = LocalEngine(path, tmp_path, speculation=("ngram",))
    assert engine.core.info.proposers == []
    assert any(line.startswith("no speculation") for line in engine.core.info.memory_plan)
    prompt = [5, 17, 90] * 5
    assert_greedy(load_dense(path), prompt, engine.generate(prompt))
    engine.close()


def test_the_plan_counts_states_beside_blocks(tmp_path: Path) -> None:
    path = save(tmp_path / "model", "falcon_h1")
    engine = LocalEngine(path, tmp_path, kv_block_size=BLOCK_SIZE, max_num_seqs=4)
    (line,) = [line for line in engine.core.info.memory_plan if line.startswith("states of")]
    channels = 128 + 2 * 16  # of the convolution: the inputs, B and C
    size = 4 * (channels * 3 + 8 * 16 * 16)
    assert line.startswith(f"states of 2 layers 12 blocks, {2 * size} bytes each")
    plan = engine.core.parts.plan
    assert plan.kv_block_bytes == (2 * 2 * 2 * 16 * 4 * BLOCK_SIZE, 2 * size)
    engine.close()
