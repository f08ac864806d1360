"""Decoder layers in one call of the CPU's library: they give the bits of the layers' own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.messages import Pooling
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.decoder_layers import OneCallLayer
from loraplex.engine.model.forward import PagedForward, run_model
from loraplex.engine.model.fused_layers import Share
from loraplex.engine.model.layer_subset import EARLY_EXIT, LayerSubset
from loraplex.engine.model.whole_base import load_base_model
from loraplex.kernels.bfloat16_linear_cpu import BFloat16PanelLinear
from loraplex.kernels.decoder_layer_cpu import DecoderLayerOnCpu
from loraplex.kernels.int8_linear_cpu import Int8PanelLinear
from loraplex.kernels.linear_cpu import PanelLinear
from loraplex.kernels.quantized_linear_cpu import QuantizedPanelLinear
from support import paged
from support.cpu_kernels import multiplies_bfloat16, needs_cpu_library
from support.engine import LocalEngine
from support.families import SERVED, save_family
from support.features import Feature, dense_logits, make_world
from support.fused import own_rotary_afterwards
from support.paged import paged_logits

pytestmark = needs_cpu_library

BLOCK_SIZE = 16
"""The library's blocks are whole vectors; other tests have smaller ones, and layers' own code."""
SEQUENCES = [list(range(1, 30)), list(range(40, 57)), [7, 8, 9]]
IN_PANELS = {PanelLinear, BFloat16PanelLinear, Int8PanelLinear, QuantizedPanelLinear}
"""Other forms, for processors that multiply bf16 or bytes in another way, are PyTorch's calls."""
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(autouse=True)
def _own_rotary() -> Iterator[None]:
    with own_rotary_afterwards():
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("llama"), *SERVED["llama"])


def load(path: Path, **settings: Any) -> BaseModel:
    return load_base_model(EngineConfig(str(path), device="cpu", **settings))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[bool, int]]:
    """The calls of layers that were one call meanwhile, and of those that were not."""
    counts = {True: 0, False: 0}
    served = OneCallLayer.served

    def counting(layer: OneCallLayer, *args: Any) -> Tensor | None:
        result = served(layer, *args)
        counts[result is not None] += 1
        return result

    with monkeypatch.context() as patch:
        patch.setattr(OneCallLayer, "served", counting)
        yield counts


@contextmanager
def own_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Meanwhile every layer has its own code."""
    with monkeypatch.context() as patch:
        patch.setattr(OneCallLayer, "served", lambda *_: None)
        yield


def serve(base: BaseModel) -> list[Tensor]:
    return paged_logits(base, SEQUENCES, block_size=BLOCK_SIZE)


def are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"quantization": Quantization.INT8}),
        ("llama", {"quantization": Quantization.INT8, "dtype": "bfloat16"}),
        ("qwen2", {"dtype": "bfloat16"}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("gemma3-window", {}),
        ("gemma2-softcap-window", {}),
        ("phi3-fused", {}),
    ],
    ids=str,
)
def test_steps_of_few_tokens_have_the_bits_of_the_layers_own_code(
    family: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load(save_family(tmp_path, *SERVED[family]), **settings)
    with counted(monkeypatch) as counts:
        ours = serve(base)
    assert base.fused is not None
    linears = {type(projection.linear) for projection in base.projections}
    has_form = linears <= IN_PANELS and (base.dtype is torch.float32 or multiplies_bfloat16())
    num_layers = base.config.num_hidden_layers if has_form else 0
    assert base.fused.layers == Share(num_layers, base.config.num_hidden_layers)
    assert (counts[True] > 0) == (num_layers > 0)
    with own_layers(monkeypatch):
        assert are_equal(ours, serve(base))


@pytest.mark.parametrize(
    ("family", "dtype"), [("glm", "float32"), ("ernie4_5", "bfloat16")], ids=str
)
def test_the_library_reads_no_rotation_of_another_size_or_dtype(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would read behind the end of the cosines and sines, before the bits are compared."""
    monkeypatch.setattr(DecoderLayerOnCpu, "run", lambda *_: pytest.fail("the library was called"))
    base = load(save_family(tmp_path, *SERVED[family]), dtype=dtype)
    assert base.fused is not None
    assert base.fused.layers.num_fused == 0


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
QUERIES = {**YARN, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, "beta_fast": 32.0}
"""Ministral 3 multiplies queries from position 32 on."""


@pytest.mark.parametrize(
    ("family", "rope", "num_layers"), [("llama", YARN, 2), ("ministral3", QUERIES, 0)], ids=str
)
def test_layers_are_tried_where_a_model_computes_differently(
    family: str,
    rope: dict[str, Any],
    num_layers: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = load(save_family(tmp_path, family, {"rope_parameters": rope}))
    assert base.fused is not None
    assert base.fused.layers.num_fused == num_layers
    tokens = [[token % 100 for token in range(75)]]
    ours = paged_logits(base, tokens, block_size=BLOCK_SIZE)
    with own_layers(monkeypatch):
        assert are_equal(ours, paged_logits(base, tokens, block_size=BLOCK_SIZE))


def test_every_layer_of_a_llama_in_fp32_is_one_call(llama: Path) -> None:
    fused = load(llama).fused
    assert fused is not None
    assert fused.layers == Share(2, 2)
    assert str(fused).endswith("2 of 2 decoder layers")


def test_rows_of_many_adapters_equal_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features: list[Feature] = [
        {"target_modules": LINEAR},
        {"target_modules": ["k_proj", "down_proj"], "r": 3},
        {"target_modules": ["o_proj"], "r": 33},
    ]
    world = make_world(tmp_path, "llama", features)
    sequences = world.sequences()
    with counted(monkeypatch) as counts:
        logits = world.serve(sequences, block_size=BLOCK_SIZE)
    assert counts[True]
    for model, tokens, ours in zip(world.tuned, sequences[1:-1], logits[1:-1], strict=True):
        assert (ours - dense_logits(model, tokens)).abs().max() < 1e-4
    with own_layers(monkeypatch):
        assert are_equal(logits, world.serve(sequences, block_size=BLOCK_SIZE))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_layer_computes_only_the_rows_that_are_read(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == "bfloat16" and not multiplies_bfloat16():
        pytest.skip("layers in bf16 are no one call")
    features: list[Feature] = [{"target_modules": LINEAR}, {"target_modules": ["o_proj"], "r": 33}]
    world = make_world(tmp_path, "llama", features, dtype=dtype)
    last = world.base.model.model.layers[-1]
    results: list[Tensor] = []
    num_left_out = 0

    def run_twice(
        model: Any, step: PagedForward, ids: Tensor, places: Tensor, all_rows: Tensor
    ) -> Tensor:
        nonlocal num_left_out
        logits = run_model(model, step, ids, places, all_rows)
        kept = all_rows[1::3]
        results.clear()
        own = run_model(model, replace(step, kept=kept, rows={}), ids, places, kept)
        assert torch.equal(own, logits[kept])
        num_left_out += int((results[0][0] == 0).all(-1).sum())
        return logits

    monkeypatch.setattr(paged, "run_model", run_twice)
    last.register_forward_hook(lambda _module, _args, result: results.append(result))
    world.serve(world.sequences(), block_size=BLOCK_SIZE)
    assert num_left_out > 10


def test_a_step_with_an_adapter_that_is_more_than_lora_has_the_layers_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(tmp_path, "llama", [{"target_modules": LINEAR, "use_dora": True}])
    sequences = world.sequences()
    with counted(monkeypatch) as counts:
        (_, ours, _) = world.serve(sequences, block_size=BLOCK_SIZE)
    assert counts[False]
    assert (ours - dense_logits(world.tuned[0], sequences[1])).abs().max() < 1e-4


def scaled_residual(self: Any, hidden_states: Tensor, **others: Any) -> Tensor:
    result: Tensor = own_forward(self, hidden_states, **others)
    return result + 1e-4 * hidden_states


own_forward = modeling_llama.LlamaDecoderLayer.forward


def tuple_forward(self: Any, hidden_states: Tensor, **others: Any) -> Any:
    return (own_forward(self, hidden_states, **others),)[0].clone().view_as(hidden_states)


@pytest.mark.parametrize(("forward", "num_fused"), [(scaled_residual, 0), (tuple_forward, 2)])
def test_a_layer_that_computes_something_else_keeps_its_own_code(
    llama: Path, monkeypatch: pytest.MonkeyPatch, forward: Callable[..., Any], num_fused: int
) -> None:
    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", forward)
    fused = load(llama).fused
    assert fused is not None
    assert fused.layers == Share(num_fused, 2)


def test_layers_that_are_left_out_for_drafts_are_one_call_again_afterwards(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load(llama)
    expected = serve(base)
    subset = LayerSubset(EARLY_EXIT, base.model, base.config, range(1))
    with subset.only():
        assert not are_equal(serve(base), expected)
    with counted(monkeypatch) as counts:
        assert are_equal(serve(base), expected)
    assert counts[True]


def test_a_quantized_cache_keeps_the_layers_own_code(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load(llama, kv_dtype="int8")
    with counted(monkeypatch) as counts:
        serve(base)
    assert not counts[True]


@pytest.mark.parametrize(
    ("reads", "num_kept"),
    [
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 1, "num_prompt_logprobs": 1}, None),
        ({"max_tokens": 0, "pooling": Pooling.MEAN}, None),
    ],
    ids=["a token", "logprobs of the prompt", "an embedding"],
)
def test_a_prompt_s_step_keeps_the_rows_that_its_request_reads(
    reads: dict[str, Any],
    num_kept: int | None,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[int | None] = []
    served = OneCallLayer.served

    def recording(layer: OneCallLayer, step: PagedForward, *args: Any) -> Tensor | None:
        kept.append(None if step.kept is None else len(step.kept))
        return served(layer, step, *args)

    monkeypatch.setattr(OneCallLayer, "served", recording)
    engine = LocalEngine(llama, tmp_path)
    kept.clear()
    engine.submit(SEQUENCES[1], **reads)
    engine.run()
    engine.close()
    assert set(kept) == {num_kept}
