"""Decode steps with the fixed memory of graphs, on the CPU: a replay computes the step again."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.config import EngineConfig, KvDtype, Quantization
from loraplex.engine.draft import ROOT
from loraplex.engine.execution import decode_graphs
from loraplex.engine.execution.decode_graphs import RANK_CLASSES, Shape, max_rows, row_sizes
from loraplex.engine.execution.runner import StepOutput
from loraplex.engine.messages import FinishReason, Pooling, SpeculationParams
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.inputs import make_inputs
from loraplex.engine.speculation import draft_model, eagle
from support import length_ropes
from support.eagle import Made, save_random_head, spied
from support.engine import LocalEngine
from support.families import FOUR_LAYERS, SERVED, VOCAB_SIZE, save_family
from support.greedy import assert_greedy
from support.length_ropes import BORDER, LONGEST
from support.marks import marked_slow
from support.models import ALL_LINEAR_TARGETS, make_adapter
from support.mtp import SHIPPING, save_shipping
from support.peft_features import make_adapter as make_feature_adapter
from support.peft_features import save_base
from support.plain_tiles import add_tiles
from support.speculation import ScriptedProposer, ScriptedTreeProposer, scripted
from support.tuned import make_tuned

RANKS = (1, 4, 24, 3)
PROMPTS = [[7 * row + column for column in range(3 + 5 * row)] for row in range(6)]
LORA: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral-window": {"target_modules": ["q_proj", "v_proj"]},
    "llama4-chunks": {"target_modules": ["q_proj", "v_proj"]},
    "bloom-slopes": {"target_modules": ["query_key_value", "dense"]},
    "deepseek_v2-mla": {"target_modules": ["q_proj", "o_proj"]},
}
WINDOWS = {"attention_window": 8, "attention_sinks": 2}


class Recorder:
    """Stands in for CUDA: computes what was captured again when it is replayed."""

    def __init__(self, *, fails: bool = False) -> None:
        self.num_captured = 0
        self.fails = fails

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1
        compute()
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        return compute


class Engines:
    """The same engine with graphs and without, and the same adapters on both."""

    def __init__(
        self, base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **config: object
    ) -> None:
        self.recorder = Recorder(fails=bool(config.pop("fails", False)))
        module = ModuleType("lora_triton")
        module.add_tiles = add_tiles  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "loraplex.kernels.lora_triton", module)
        settings = {"max_num_seqs": 6, "kv_block_size": 4, **config}
        self.eager = LocalEngine(base, folder, dtype="float32", **settings)
        with monkeypatch.context() as patch:
            patch.setattr(decode_graphs, "CudaCapture", lambda _device: self.recorder)
            patch.setattr(decode_graphs, "_is_captured", lambda *_: True)
            self.replayed = LocalEngine(
                base, folder, dtype="float32", async_scheduling=True, **settings
            )

    def add_adapter(self, folder: Path) -> AdapterKey:
        self.eager.add_adapter(folder)
        return self.replayed.add_adapter(folder)

    def serve(self, *adapters: AdapterKey | None, **request: Any) -> list[list[list[int]]]:
        """The tokens of a request for each of these adapters, with graphs and without."""
        return [_serve(engine, adapters, **request) for engine in (self.replayed, self.eager)]

    @property
    def num_replayed(self) -> int:
        return self.replayed.core.stats().num_graph_steps

    @property
    def num_eager(self) -> int:
        return self.replayed.core.stats().num_eager_decodes


def _serve(
    engine: LocalEngine, adapters: Sequence[AdapterKey | None], **request: Any
) -> list[list[int]]:
    ids = [
        engine.submit(PROMPTS[row], key, **{"max_tokens": 5, "ignore_eos": True, **request})
        for row, key in enumerate(adapters)
    ]
    engine.run()
    reasons = {engine.answers[request_id].end.reason for request_id in ids}
    assert reasons == {FinishReason.LENGTH}
    return engine.tokens(ids)


@pytest.mark.parametrize(
    "config",
    [
        {},
        WINDOWS,
        pytest.param({"kv_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param({"kv_dtype": "int4"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_replays_with_more_adapters_of_higher_ranks_give_what_eager_steps_give(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object]
) -> None:
    engines = Engines(tiny_base, tmp_path, monkeypatch, **config)
    keys = [
        engines.add_adapter(make_adapter(tiny_base, tmp_path / f"{rank}", seed=rank, r=rank))
        for rank in RANKS
    ]
    for adapters in ([None] * 3, [keys[0], None], [*keys, None], [keys[2]] * 6, [keys[3]]):
        replayed, eager = engines.serve(*adapters)
        assert replayed == eager
    assert engines.num_replayed >= 5 * 4
    assert engines.num_eager == 0
    # Base and rank 16 for all sizes at the start; rank 64 when the adapter of rank 24 came, once
    # for each size of its steps: how the prompts were cut into steps decides which sizes.
    graphs = engines.replayed.core.parts.runner._graphs
    assert graphs is not None
    sizes = row_sizes(6, 256)
    at_start = {Shape(size, rank) for size in sizes for rank in (0, 16)}
    later = graphs._replays.keys() - at_start
    assert later
    assert later <= {Shape(size, 64) for size in sizes}
    assert engines.recorder.num_captured == len(at_start) + len(later), "each of them once"


@pytest.mark.parametrize(
    ("case", "drafts"), [("phi3", False), pytest.param("phimoe", True, marks=pytest.mark.slow)]
)
def test_requests_of_different_rotary_contexts_share_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, drafts: bool
) -> None:
    base = length_ropes.save(tmp_path / "base", case)
    speculation = (f"draft:{base}",) if drafts else ()
    engines = Engines(base, tmp_path, monkeypatch, speculation=speculation)
    replayed, eager = engines.serve(*[None] * 6)
    assert replayed == eager
    assert engines.num_replayed > 0
    assert engines.num_eager == 0
    dense = [length_ropes.load_dense_for(base, length) for length in (BORDER, LONGEST)]
    for prompt, answer in zip(PROMPTS, replayed, strict=True):
        assert_greedy(dense[len(prompt) + len(answer) > BORDER], prompt, answer)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_an_adapter_of_the_output_head_is_served_by_replays_beside_others(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(tiny_base, tmp_path, monkeypatch, arena_bytes=16 << 20)
    loras: list[dict[str, Any]] = [
        {},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["lm_head", "v_proj"], "r": 20},
    ]
    plain, head, both = (
        engines.add_adapter(make_adapter(tiny_base, tmp_path / f"{seed}", seed=seed, **lora))
        for seed, lora in enumerate(loras)
    )
    for adapters in ([None, head], [plain, head, None, both, head], [plain, None]):
        replayed, eager = engines.serve(*adapters)
        assert replayed == eager
    assert replayed != engines.serve(head, None)[0], "the head's adapter has an effect"
    assert engines.num_eager == 0


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_adapters_with_vectors_are_served_by_replays_beside_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_base("llama_bias", tmp_path / "base")
    engines = Engines(base, tmp_path, monkeypatch, arena_bytes=16 << 20)
    targets = [*ALL_LINEAR_TARGETS, "lm_head"]
    folders = [
        make_adapter(base, tmp_path / "plain", seed=1),
        make_adapter(base, tmp_path / "dora", seed=2, use_dora=True, target_modules=targets),
        make_adapter(base, tmp_path / "high", seed=3, r=20, use_dora=True),
    ]
    for name in ("bias", "lora_bias"):
        folders.append(tmp_path / name)
        make_feature_adapter(name, folders[-1], AutoModelForCausalLM.from_pretrained(base))
    folders.append(only_biases(folders[-2], tmp_path / "only biases"))
    plain, *others = map(engines.add_adapter, folders)
    at_start = engines.recorder.num_captured
    expected, _ = engines.serve(plain, None)
    assert engines.recorder.num_captured == at_start, "plain steps have graphs without vectors"
    for key in others:
        replayed, eager = engines.serve(plain, None, key)
        assert replayed == eager
        assert replayed[:2] == expected, "its neighbours answer as without it"
        assert replayed[2] != engines.serve(None, None, None)[0][2]
    replayed, eager = engines.serve(*others, plain)
    assert replayed == eager
    assert engines.num_eager == 0
    num_captured = engines.recorder.num_captured
    engines.serve(*others, plain)
    assert num_captured == engines.recorder.num_captured > at_start, "each of them once"


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("qwen2_moe-window", Quantization.NONE),
        pytest.param("llama4-chunks", Quantization.NONE, marks=pytest.mark.slow),
        pytest.param("gpt_oss-sinks-window", Quantization.NONE, marks=pytest.mark.slow),
        pytest.param("gpt_oss-sinks-window", Quantization.INT4, marks=pytest.mark.slow),
    ],
)
def test_a_base_with_experts_is_served_by_replays_with_adapters_of_any_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, quantization: Quantization
) -> None:
    base = save_family(tmp_path / "base", *SERVED[family])
    settings = {"arena_bytes": 16 << 20, "quantization": quantization}
    engines = Engines(base, tmp_path, monkeypatch, **settings)
    assert engines.replayed.core.parts.base.moe_layers
    plain, experts, router, both = map(engines.add_adapter, save_moe_adapters(base, tmp_path))
    at_start = engines.recorder.num_captured
    alone = [engines.serve(key)[0][0] for key in (None, plain, router)]
    assert engines.recorder.num_captured == at_start, "no experts' LoRA for those"
    assert alone[1] != alone[0] != alone[2]
    for adapters in ([None, plain, router], [experts, None, plain], [both, router, experts, None]):
        replayed, eager = engines.serve(*adapters)
        assert replayed == eager
    assert replayed[0] != engines.serve(None)[0][0], "an adapter of experts has an effect"
    assert engines.recorder.num_captured > at_start
    assert engines.num_eager == 0


def save_moe_adapters(base: Path, folder: Path) -> list[Path]:
    """Adapters of a linear layer, of the experts, of the router, and of two of these."""
    parts: list[dict[str, Any]] = [
        {"target_modules": ["q_proj"]},
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        {"target_parameters": ["gate.weight", "router.weight"]},
        {"target_parameters": ["experts.down_proj"], "target_modules": ["o_proj"], "r": 20},
    ]
    paths = [folder / f"{seed}" for seed in range(len(parts))]
    for seed, (path, lora) in enumerate(zip(paths, parts, strict=True)):
        model = AutoModelForCausalLM.from_pretrained(base)
        make_tuned(model, seed=seed, scale=0.5, **lora).save_pretrained(path)
    return paths


def test_a_model_that_reads_values_on_the_host_has_no_graphs(
    tiny_base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(BaseModel, "host_reads", ("aten.nonzero.default",))
    engines = Engines(tiny_base, tmp_path, monkeypatch)
    replayed, eager = engines.serve(None, None)
    assert replayed == eager
    assert engines.recorder.num_captured == engines.num_replayed == 0
    assert "the model waits for aten.nonzero.default" in caplog.text


def only_biases(folder: Path, path: Path) -> Path:
    """The adapter without its A and B."""
    path.mkdir()
    shutil.copy(folder / "adapter_config.json", path)
    tensors = load_file(folder / "adapter_model.safetensors")
    biases = {name: values for name, values in tensors.items() if name.endswith(".bias")}
    save_file(biases, path / "adapter_model.safetensors")
    return path


@pytest.mark.parametrize("config", [WINDOWS, {"kv_dtype": "int4"}], ids=str)
def test_drafts_are_verified_and_short_prompts_computed_by_replays(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object]
) -> None:
    proposer = ScriptedProposer({}, error=0.2)
    with scripted(proposer) as name:
        engines = Engines(
            tiny_base, tmp_path, monkeypatch, max_num_seqs=24, speculation=(name,), **config
        )
    key = engines.add_adapter(make_adapter(tiny_base, tmp_path / "adapter", seed=1))
    expected = _serve(engines.eager, [None, key], max_tokens=60)
    proposer.answers = {f"r{row}": tokens for row, tokens in enumerate(expected)}
    assert _serve(engines.replayed, [None, key], max_tokens=60) == expected
    stats = engines.replayed.core.stats()
    assert stats.speculation_totals[0].num_accepted_tokens > 0
    assert stats.num_graph_steps == stats.num_steps


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"kv_cache_bytes": 18 * 4 * 512, "max_num_batched_tokens": 64, **WINDOWS}),
        pytest.param("llama", {}, marks=pytest.mark.slow),
        pytest.param("mistral-window", {}, marks=pytest.mark.slow),
        pytest.param("llama", {"kv_dtype": "int8", **WINDOWS}, marks=pytest.mark.slow),
        pytest.param("llama4-chunks", {}, marks=pytest.mark.slow),
        pytest.param("bloom-slopes", {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v2-mla", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_trees_are_verified_by_replays_beside_plain_rows_and_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, config: dict[str, object]
) -> None:
    model_type, differences = SERVED[family]
    # A random model with tied embeddings repeats its last token, whatever its cache says.
    untied = {**differences, "tie_word_embeddings": False}
    base = save_family(tmp_path / "base", model_type, untied)
    proposer = ScriptedTreeProposer({}, error=0.15, vocab_size=VOCAB_SIZE)
    with scripted(proposer) as name:
        engines = Engines(base, tmp_path, monkeypatch, speculation=(name,), **config)
    key = engines.add_adapter(make_adapter(base, tmp_path / "adapter", seed=1, **LORA[family]))
    plain, trees = SpeculationParams(num_tokens=0), SpeculationParams(num_tokens=6)
    adapters, asked = [None, key, None, key, key], [trees, trees, plain, trees, plain]
    expected = serve_each(engines.eager, adapters, [plain] * len(asked))
    proposer.answers = {f"r{row}": tokens for row, tokens in enumerate(expected)}
    assert serve_each(engines.replayed, adapters, asked) == expected
    # Known prompts are found in the prefix cache.
    proposer.answers = {f"r{row + len(asked)}": tokens for row, tokens in enumerate(expected)}
    assert serve_each(engines.replayed, adapters, asked) == expected
    stats = engines.replayed.core.stats()
    assert stats.speculation_totals[0].num_accepted_tokens > 25
    assert stats.num_graph_steps == stats.num_steps
    assert stats.num_cached_tokens > 0
    assert (stats.num_preemptions > 0) == ("kv_cache_bytes" in config)


def serve_each(
    engine: LocalEngine,
    adapters: Sequence[AdapterKey | None],
    asked: Sequence[SpeculationParams],
    temperature: float = 0.0,
) -> list[list[int]]:
    """The tokens of a request with each of these adapters and its speculation."""
    ids = [
        engine.submit(
            PROMPTS[row],
            key,
            max_tokens=20,
            ignore_eos=True,
            temperature=temperature,
            seed=row,
            speculation=speculation,
        )
        for row, (key, speculation) in enumerate(zip(adapters, asked, strict=True))
    ]
    engine.run()
    return engine.tokens(ids)


@pytest.mark.parametrize("proposer", marked_slow(["draft", "draft_tree"], slow={"draft_tree"}))
def test_a_draft_model_runs_in_graphs_of_its_own(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    speculation = (f"{proposer}:{tiny_base}",)
    engines = Engines(tiny_base, tmp_path, monkeypatch, speculation=speculation)
    key = engines.add_adapter(make_adapter(tiny_base, tmp_path / "adapter", seed=1))
    (line,) = [line for line in engines.replayed.core.parts.plan.lines if "draft model:" in line]
    sizes = row_sizes(6, 256)
    assert line.startswith(f"draft model: {len(sizes)} decode graphs captured in ")
    num_captured = engines.recorder.num_captured
    assert num_captured == (decode_graphs.CLASSES_AT_START + 1) * len(sizes)
    expected = _serve(engines.eager, [None, key, None], max_tokens=30)

    eager = Mock(wraps=make_inputs)
    monkeypatch.setattr(draft_model, "make_inputs", eager)
    asked = SpeculationParams(num_tokens=4)
    answers = _serve(engines.replayed, [None, key, None], max_tokens=30, speculation=asked)
    assert answers == expected
    eager.assert_not_called()
    totals = engines.replayed.core.stats().speculation_totals[0]
    assert totals.num_draft_tokens > totals.num_accepted_tokens > 0
    assert engines.recorder.num_captured == num_captured
    # Prompts that read too much row by row are computed by the kernels for prompts.
    monkeypatch.setattr(decode_graphs, "MAX_PROMPT_READS", 0)
    requests = [None, key, None, None, key]
    replayed = _serve(engines.replayed, requests, max_tokens=30, speculation=asked)
    assert replayed == _serve(engines.eager, requests, max_tokens=30)
    eager.assert_called()


@pytest.mark.parametrize("proposer", ["eagle_tree", pytest.param("eagle", marks=pytest.mark.slow)])
def test_a_head_drafts_in_graphs_of_its_own_what_it_drafts_eagerly(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    save_random_head(tiny_base, tmp_path / "head")
    settings = {"speculation": (f"{proposer}:{tmp_path / 'head'}",), "max_num_batched_tokens": 48}
    engines = Engines(tiny_base, tmp_path, monkeypatch, **settings)
    key = engines.add_adapter(make_adapter(tiny_base, tmp_path / "adapter", seed=1))
    drafts = assert_drafts_alike(engines, monkeypatch, proposer, [None, key, None, None])
    assert any((draft.parents or (ROOT,)).count(ROOT) < len(draft) for *_, draft in drafts), (
        "levels were drafted"
    )


@pytest.mark.parametrize(
    "family", marked_slow(sorted(SHIPPING), slow={"deepseek_v3", "glm4_moe_lite"})
)
def test_a_multi_token_head_drafts_in_graphs_what_it_drafts_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    assert_multi_token_head_drafts_alike(family, "mtp", tmp_path, monkeypatch)


@pytest.mark.slow
def test_trees_of_a_multi_token_head_are_drafted_in_graphs_as_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_multi_token_head_drafts_alike("glm4_moe", "mtp_tree", tmp_path, monkeypatch)


def assert_multi_token_head_drafts_alike(
    family: str, proposer: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_shipping(folder / "base", family)
    settings: dict[str, object] = {"speculation": (proposer,), "max_num_batched_tokens": 48}
    engines = Engines(base, folder, monkeypatch, **settings)
    assert_drafts_alike(engines, monkeypatch, proposer, [None] * 4)


def assert_drafts_alike(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    proposer: str,
    adapters: Sequence[AdapterKey | None],
) -> Made:
    """The head's passes and all steps are replayed; returns what was drafted."""
    sizes, lines = row_sizes(6, 48), engines.replayed.core.parts.plan.lines
    assert any(line.startswith(f"{proposer}: {len(sizes)} graphs of") for line in lines)
    asked = [SpeculationParams(num_tokens=count) for count in (5, 3, 0, 1)]
    # Where it is hot, the noise decides, which the head knows.
    with spied() as expected:
        answers = serve_each(engines.eager, adapters, asked, temperature=2.0)

    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("a pass is laid out for kernels")

    monkeypatch.setattr(eagle, "make_inputs", refuse)
    monkeypatch.setattr(eagle, "ChainInputs", refuse)
    with spied() as drafts:
        assert serve_each(engines.replayed, adapters, asked, temperature=2.0) == answers
    assert by_prefix(drafts) == by_prefix(expected)
    stats = engines.replayed.core.stats()
    assert stats.speculation_totals[0].num_accepted_tokens > 5
    assert stats.num_graph_steps == stats.num_steps
    return drafts


def by_prefix(made: Made) -> dict[tuple[str, int], tuple[object, object]]:
    """Of each request and number of known tokens the draft: requests need not start together."""
    return {
        (request_id, len(known)): (draft.token_ids, draft.parents)
        for request_id, known, draft in made
    }


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["eagle", "eagle_tree"])
def test_a_head_whose_passes_cannot_be_captured_drafts_eagerly(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    save_random_head(tiny_base, tmp_path / "head")
    speculation = (f"{proposer}:{tmp_path / 'head'}",)
    engines = Engines(tiny_base, tmp_path, monkeypatch, speculation=speculation, fails=True)
    lines = engines.replayed.core.parts.plan.lines
    assert any(line.startswith(f"{proposer}: 0 graphs of") for line in lines)
    replayed, eager = engines.serve(None, None, speculation=SpeculationParams(num_tokens=3))
    assert replayed == eager


@pytest.mark.parametrize(
    "proposer", marked_slow(["early_exit", "early_exit_tree"], slow={"early_exit"})
)
def test_early_exit_runs_in_graphs_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    base = save_family(tmp_path / "base", "llama", FOUR_LAYERS)
    speculation = (f"{proposer}:3",)
    engines = Engines(base, tmp_path, monkeypatch, speculation=speculation)
    key = engines.add_adapter(make_adapter(base, tmp_path / "adapter", seed=1))
    lines = engines.replayed.core.parts.plan.lines
    assert any(line.startswith(f"{proposer}: ") for line in lines)
    num_captured = engines.recorder.num_captured
    assert num_captured == 2 * decode_graphs.CLASSES_AT_START * len(row_sizes(6, 256))
    expected = _serve(engines.eager, [None, key, None], max_tokens=30)

    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("the first layers run eagerly")

    monkeypatch.setattr(engines.replayed.core.parts.runner, "run_chunks", refuse)
    asked = SpeculationParams(num_tokens=4)
    answers = _serve(engines.replayed, [None, key, None], max_tokens=30, speculation=asked)
    assert answers == expected
    totals = engines.replayed.core.stats().speculation_totals[0]
    assert totals.num_draft_tokens > totals.num_accepted_tokens > 0
    assert engines.recorder.num_captured == num_captured


@pytest.mark.parametrize("max_num_batched_tokens", [1024, 20], ids=["all", "within the budget"])
def test_a_full_batch_s_drafts_are_verified_by_replays(
    tiny_base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    max_num_batched_tokens: int,
) -> None:
    proposer = ScriptedProposer({})
    size = 6
    with scripted(proposer) as name:
        engines = Engines(
            tiny_base,
            tmp_path,
            monkeypatch,
            max_num_seqs=size,
            max_num_batched_tokens=max_num_batched_tokens,
            speculation=(name,),
        )
    expected = _serve(engines.eager, [None] * size, max_tokens=40)
    proposer.answers = {f"r{row}": tokens for row, tokens in enumerate(expected)}
    asked = SpeculationParams(num_tokens=8)
    assert _serve(engines.replayed, [None] * size, max_tokens=40, speculation=asked) == expected
    stats = engines.replayed.core.stats()
    assert stats.speculation_totals[0].num_accepted_tokens > 20 * size
    assert stats.num_eager_decodes == 0


@pytest.mark.parametrize("max_prompt_reads", [decode_graphs.MAX_PROMPT_READS, 18 * 18 - 1])
def test_prompts_are_computed_by_replays_unless_their_rows_read_too_much(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_prompt_reads: int
) -> None:
    monkeypatch.setattr(decode_graphs, "MAX_PROMPT_READS", max_prompt_reads)
    engines = Engines(tiny_base, tmp_path, monkeypatch, max_num_seqs=2)
    key = engines.add_adapter(make_adapter(tiny_base, tmp_path / "adapter", seed=1))
    replayed, eager = engines.serve(None, key, None, key)
    assert replayed == eager
    assert max(map(len, PROMPTS[:4])) == 18
    num_eager = engines.replayed.core.stats().num_steps - engines.num_replayed
    assert (num_eager > 0) == (max_prompt_reads < 18 * 18)


def test_what_is_read_of_a_step_is_that_of_its_own_rows(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(tiny_base, tmp_path, monkeypatch)
    engines.serve(*[None] * 6)
    for request in ({"num_logprobs": 2}, {"temperature": 1.0, "seed": 3}):
        replayed, eager = engines.serve(None, None, None, **request)
        assert replayed == eager
    for engine in (engines.replayed, engines.eager):
        assert engine.core.stats().num_free_kv_blocks == engine.core.info.num_kv_blocks


def test_a_row_that_is_not_finite_ends_its_own_request_alone(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(tiny_base, tmp_path, monkeypatch)
    key = engines.add_adapter(make_adapter(tiny_base, tmp_path / "adapter", seed=1))
    expected = engines.serve(None, None)[0]
    engine = engines.replayed
    ids = [
        engine.submit(PROMPTS[row], adapter, max_tokens=5, ignore_eos=True)
        for row, adapter in enumerate((None, None, key))
    ]
    while len(engine.answers[ids[2]].token_ids) < 2:
        engine.step()
    engine.core.parts.tiers.arena.flat.fill_(torch.inf)
    engine.run()
    assert engine.tokens(ids[:2]) == expected
    error = engine.answers[ids[2]].end.error
    assert error is not None
    assert error.code == "numerical_error"


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_what_no_graph_serves_runs_eagerly_and_is_counted(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(tiny_base, tmp_path, monkeypatch, arena_bytes=16 << 20)
    folders = [
        make_adapter(tiny_base, tmp_path / "ends", seed=1, target_modules=["embed_tokens"]),
        make_adapter(
            tiny_base, tmp_path / "rows", seed=2, trainable_token_indices={"lm_head": [3, 5]}
        ),
    ]
    for number, key in enumerate(map(engines.add_adapter, folders), start=1):
        replayed, eager = engines.serve(None, key)
        assert replayed == eager
        assert engines.num_eager == 4 * number


def test_an_adapter_of_the_highest_ranks_runs_in_graphs(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(tiny_base, tmp_path, monkeypatch, arena_bytes=16 << 20)
    folder = make_adapter(
        tiny_base, tmp_path / "high", seed=3, r=RANK_CLASSES[-2] + 1, target_modules=["q_proj"]
    )
    key = engines.add_adapter(folder)
    replayed, eager = engines.serve(None, key)
    assert replayed == eager
    assert engines.num_eager == 0


def test_embeddings_are_those_of_eager_steps_and_leave_the_decodes_beside_them_in_graphs(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(tiny_base, tmp_path, monkeypatch)
    key = engines.add_adapter(make_adapter(tiny_base, tmp_path / "adapter", seed=1))
    answers = []
    for engine in (engines.replayed, engines.eager):
        decoding = engine.submit(PROMPTS[3], key, max_tokens=8, ignore_eos=True)
        pooled = []
        for prompt, adapter, pooling in (
            (PROMPTS[0], None, Pooling.LAST),
            (PROMPTS[2], key, Pooling.MEAN),
        ):
            engine.step()
            pooled.append(engine.submit(prompt, adapter, max_tokens=0, pooling=pooling))
        engine.run()
        vectors = [engine.answers[request_id].prompts[-1].embedding for request_id in pooled]
        answers.append((engine.answers[decoding].token_ids, vectors))
    (tokens, vectors), (expected_tokens, expected) = answers
    assert tokens == expected_tokens
    for ours, theirs in zip(vectors, expected, strict=True):
        assert ours is not None
        assert theirs is not None
        found, eager = (np.frombuffer(each, np.float32) for each in (ours, theirs))
        np.testing.assert_allclose(found, eager, atol=1e-5)
    runner = engines.replayed.core.parts.runner
    assert (runner.num_graph_steps, runner.num_eager_decodes) == (engines.num_replayed, 0)
    assert engines.num_replayed > 8


def test_a_step_that_cannot_be_captured_runs_eagerly(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(tiny_base, tmp_path, monkeypatch, fails=True)
    num_tried = engines.recorder.num_captured
    replayed, eager = engines.serve(None, None)
    assert replayed == eager
    assert (engines.num_replayed, engines.num_eager) == (0, 4)
    assert engines.recorder.num_captured == num_tried, "once is enough"


class FakeCuda:
    """Streams by name, and captures that fail as PyTorch's do: they leave their stream current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = self.main = FakeStream()
        names = {
            "Stream": lambda _device: FakeStream(),
            "graph_pool_handle": object,
            "current_stream": lambda _device: self.current,
            "stream": self._stream,
            "CUDAGraph": lambda: SimpleNamespace(replay=None),
            "graph": self._graph,
        }
        for name, value in names.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def _stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def _graph(self, _graph: object, *, stream: FakeStream, **_options: object) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class FakeStream:
    def __init__(self) -> None:
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other)


@pytest.mark.parametrize("failing_call", [1, 2], ids=["computing", "capturing"])
def test_a_capture_that_fails_leaves_the_stream_that_was_current(
    monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    cuda = FakeCuda(monkeypatch)
    seen: list[FakeStream] = []

    def compute() -> None:
        seen.append(cuda.current)
        if len(seen) == failing_call:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        decode_graphs.CudaCapture(torch.device("cuda"))(compute)
    assert cuda.current is cuda.main
    assert cuda.main.waited_for == seen[-1:], "what was computed there is not overtaken"
    assert cuda.main not in seen


def test_hidden_states_are_those_of_the_step(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(tiny_base, tmp_path, monkeypatch)
    seen: list[list[Tensor]] = [[], []]
    for engine, states in zip((engines.replayed, engines.eager), seen, strict=True):
        watching = engine.core.parts.runner
        watching.keeps_hidden_states = True
        watching.capture()
        run = watching.run

        def watched(*args: Any, run: Any = run, states: list[Tensor] = states) -> StepOutput:
            output: StepOutput = run(*args)
            assert output.hidden_states is not None
            states.append(output.hidden_states.clone())
            return output

        monkeypatch.setattr(watching, "run", watched)
    replayed, eager = engines.serve(None, None, None)
    assert replayed == eager
    assert engines.num_replayed > 0
    for ours, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_graphs_with_adapters_are_captured_again_when_the_arena_s_table_grows(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(tiny_base, tmp_path, monkeypatch)
    key = engines.add_adapter(make_adapter(tiny_base, tmp_path / "adapter", seed=1))
    assert engines.serve(key)[0] == engines.serve(key)[1]
    num_captured = engines.recorder.num_captured
    arena = engines.replayed.core.parts.tiers.arena
    before, arena.table = arena.table, arena.table.clone()
    before.fill_(1 << 40)
    replayed, eager = engines.serve(key)
    assert replayed == eager
    assert engines.recorder.num_captured == num_captured + 2, "of the prompt's rows, and of one row"


def test_numbers_of_rows_are_few_and_pad_little() -> None:
    assert row_sizes(1, 1) == [1]
    assert row_sizes(3, 3) == [1, 2, 3]
    assert row_sizes(20, 20) == [1, 2, 4, 8, 16, 20]
    for most in (64, 256, 1000):
        sizes = row_sizes(most, most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        assert all(b - a <= max(8, a // 8 + 8) for a, b in pairwise(sizes))
    assert len(row_sizes(1000, 1000)) < 50


def test_numbers_of_rows_above_those_of_decodes_go_on_in_larger_steps() -> None:
    assert row_sizes(4, 30) == [1, 2, 4, 30]
    assert row_sizes(32, 256) == [*row_sizes(32, 32), 64, 96, 128, 160, 192, 224, 256]


def test_graphs_reach_to_all_sequences_and_to_few_tokens_more() -> None:
    def most(**config: Any) -> int:
        return max_rows(EngineConfig("m", **config))

    assert most(max_num_seqs=64) == 256
    assert most(max_num_seqs=300) == 300
    assert most(max_num_seqs=64, max_num_batched_tokens=100) == 100


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kv_dtype", ["auto", "int4", "int2"])
def test_captured_steps_give_what_eager_steps_give(
    tiny_base: Path, tmp_path: Path, kv_dtype: str
) -> None:
    engines = [
        LocalEngine(
            tiny_base,
            tmp_path,
            device="cuda",
            dtype="float32",
            enforce_eager=is_eager,
            kv_dtype=KvDtype(kv_dtype),
            kv_block_size=16,
        )
        for is_eager in (False, True)
    ]
    folders = [make_adapter(tiny_base, tmp_path / f"{r}", seed=r, r=r) for r in RANKS]
    folders.append(make_adapter(tiny_base, tmp_path / "dora", seed=9, use_dora=True))
    keys, _ = ([engine.add_adapter(folder) for folder in folders] for engine in engines)
    for adapters in ([None] * 3, [keys[0], None], [*keys, None], [keys[2]] * 6):
        replayed, eager = (_serve(engine, adapters) for engine in engines)
        assert replayed == eager
    assert engines[0].core.stats().num_graph_steps > 0
    assert engines[1].core.stats().num_graph_steps == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", ["qwen2_moe-window", "gpt_oss-sinks-window"])
def test_captured_steps_with_experts_give_what_eager_steps_give(
    tmp_path: Path, family: str
) -> None:
    base = save_family(tmp_path / "base", *SERVED[family])
    engines = [
        LocalEngine(base, tmp_path, device="cuda", dtype="float32", enforce_eager=is_eager)
        for is_eager in (False, True)
    ]
    folders = save_moe_adapters(base, tmp_path)
    keys, _ = ([engine.add_adapter(folder) for folder in folders] for engine in engines)
    for adapters in ([None] * 3, [keys[0], None], [*keys, None], [keys[1]] * 6):
        replayed, eager = (_serve(engine, adapters) for engine in engines)
        assert replayed == eager
    assert engines[0].core.stats().num_graph_steps > 0
