"""A base drafts with its own weights in fewer bits, under the request's adapter."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loraplex.engine.config import EngineConfig, KvDtype, Quantization
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.messages import SpeculationParams
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.rounded_linears import RoundedLinears, rounded_format
from loraplex.engine.model.whole_base import load_base_model
from loraplex.kernels.quantize import WeightFormat, quantize
from support.engine import LocalEngine
from support.families import SERVED, save_family
from support.marks import marked_slow
from support.models import make_adapter, make_tiny_llama
from support.paged import paged_logits
from support.peft_features import save_base
from support.quantized_bases import makers
from support.ranks import run_sharded
from support.served_features import make_adapters

PROMPTS = ([5, 17, 3, 90, 4], [9, 9, 1], [7] * 20, [1, 2, 3, 4, 5, 6], [40, 41], [8, 30, 22])
SERVED_IN: dict[str, tuple[str, float, float, dict[str, Any]]] = {
    "fp32 in nf4": ("nf4", 0.9, 0.1, {}),
    "fp32": ("int8", 0.0, 0.7, {}),
    "int8 base": ("int4", 0.9, 0.1, {"quantization": Quantization.INT8}),
    "int8 KV cache": ("int8", 0.9, 0.7, {"kv_dtype": KvDtype.INT8}),
    "preempted": ("int8", 0.9, 0.7, {"kv_cache_bytes": 40 << 10, "max_model_len": 64}),
}
"""The format of the drafts, the temperature, the least acceptance, and what else is set. A tiny
base with random weights has close logits, which 4 bits often reorder."""


def answer_all(
    engine: LocalEngine, adapter_folders: Sequence[Path], temperature: float
) -> tuple[list[list[int]], int, int]:
    """The answers of base and adapters in one mixed batch, and the drafted and accepted tokens."""
    keys = [None, *(engine.add_adapter(folder) for folder in adapter_folders)]
    ids = [
        engine.submit(
            prompt,
            keys[index % len(keys)],
            max_tokens=16,
            temperature=temperature,
            seed=index,
            ignore_eos=True,
            speculation=SpeculationParams(num_tokens=4),
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    engine.run()
    engine.close()
    ends = [engine.answers[name].end for name in ids]
    return (
        engine.tokens(ids),
        sum(end.num_draft_tokens for end in ends),
        sum(end.num_accepted_tokens for end in ends),
    )


@pytest.mark.parametrize("case", marked_slow(SERVED_IN, slow=SERVED_IN.keys() - {"int8 base"}))
def test_the_answers_are_those_of_plain_decoding_whatever_is_accepted(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path, case: str
) -> None:
    weight_format, temperature, least, config = SERVED_IN[case]
    plain, _, _ = answer_all(
        LocalEngine(tiny_base, tmp_path, **config), adapter_folders, temperature
    )
    engine = LocalEngine(tiny_base, tmp_path, speculation=(f"quantized:{weight_format}",), **config)
    tokens, num_drafted, num_accepted = answer_all(engine, adapter_folders, temperature)
    assert tokens == plain
    assert num_drafted > 60
    assert num_accepted > least * num_drafted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq-ordered", "gguf-q4_k_m"])
def test_a_base_that_its_files_hold_quantized_drafts_with_its_values(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("gguf"):
        pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = makers()[name](make_tiny_llama(tmp_path / "dense", seed=1), tmp_path / "served")
    adapters = [
        make_adapter(made.plain, tmp_path / kind, seed=seed, r=3, use_dora=kind == "dora")
        for seed, kind in enumerate(("lora", "dora"))
    ]
    plain, _, _ = answer_all(LocalEngine(made.served, tmp_path), adapters, 0.0)
    engine = LocalEngine(made.served, tmp_path, speculation=("quantized:int8",))
    tokens, num_drafted, num_accepted = answer_all(engine, adapters, 0.0)
    assert tokens == plain
    assert num_accepted > 0.7 * num_drafted > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base_name", "features"),
    [
        ("llama", ("output_head", "full_matrix", "token_rows", "dora", "activated_lora")),
        ("llama_tied", ("output_head", "full_matrix", "token_rows", "tied_adapters")),
    ],
)
def test_adapters_that_change_the_ends_draft_through_the_rounded_head(
    base_name: str, features: Sequence[str], tmp_path: Path
) -> None:
    base = save_base(base_name, tmp_path / "base")
    adapters = list(make_adapters(features, base, tmp_path).values())
    plain, _, _ = answer_all(LocalEngine(base, tmp_path), adapters, 0.0)
    engine = LocalEngine(base, tmp_path, speculation=("quantized:int8",))
    tokens, num_drafted, num_accepted = answer_all(engine, adapters, 0.0)
    assert tokens == plain
    assert num_accepted > 0.7 * num_drafted > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "weight_format"),
    [
        ("llama", "int4"),
        ("gemma2-softcap-window", "int8"),
        ("deepseek_v3-mla", "nf4"),
        ("mixtral", "int4"),
        ("gpt_oss-sinks-window", "int8"),
    ],
)
def test_drafts_have_the_logits_of_a_base_that_is_quantized_at_its_load(
    family: str, weight_format: str, tmp_path: Path
) -> None:
    """And the base itself keeps its own."""
    model_type, differences = SERVED[family]
    dense = {"first_k_dense_replace": 99} if family.startswith("deepseek") else {}
    untied = {"tie_word_embeddings": False}
    path = save_family(tmp_path / "base", model_type, {**differences, **dense, **untied})
    kind = WeightFormat(weight_format)
    sequence = torch.randint(100, (21,), generator=torch.Generator().manual_seed(1)).tolist()
    plain = EngineConfig(str(path), device="cpu")
    base = load_base_model(plain, rounded=kind)
    expected = paged_logits(load_base_model(plain), [sequence])[0]
    config = EngineConfig(
        str(with_rounded_head(path, tmp_path / "rounded", kind)),
        device="cpu",
        quantization=Quantization(weight_format),
    )
    drafts_expected = paged_logits(load_base_model(config), [sequence])[0]

    with RoundedLinears(base).only():
        drafts = paged_logits(base, [sequence])[0]
    own = paged_logits(base, [sequence])[0]

    assert torch.equal(own, expected)
    assert (drafts - drafts_expected).abs().max() < 1e-4 * drafts_expected.abs().max()
    assert (drafts - own).abs().max() > 1e-3


def with_rounded_head(path: Path, folder: Path, weight_format: WeightFormat) -> Path:
    """A copy of the checkpoint, its head rounded and still dense."""
    shutil.copytree(path, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = quantize(head.float(), weight_format).dequantize(head.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def test_the_rounded_weights_are_counted(tiny_base: Path, tmp_path: Path) -> None:
    engine = LocalEngine(tiny_base, tmp_path, speculation=("quantized:int8",))
    base, lines = engine.core.parts.base, engine.core.parts.plan.lines
    engine.close()
    weights = sum(
        fused.linear.in_features * fused.linear.out_features for fused in base.projections
    )
    assert weights < base.rounded_bytes < 1.5 * weights
    assert any("rounded weights for drafts" in line for line in lines)


def test_without_the_proposer_nothing_is_held_twice(tiny_base: Path, tmp_path: Path) -> None:
    engine = LocalEngine(tiny_base, tmp_path, speculation=("early_exit:1",))
    engine.close()
    assert engine.core.parts.base.rounded_bytes == 0


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="int8, int4"):
        rounded_format(EngineConfig("base", speculation=("ngram", "quantized:int3")))


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", [WeightFormat.INT4, WeightFormat.NF4])
def test_each_rank_rounds_its_part(weight_format: WeightFormat, tmp_path: Path) -> None:
    """The drafts have the logits of a base whose parts were rounded before they were joined."""
    path = make_tiny_llama(tmp_path / "base", tie_word_embeddings=False)
    sequence = torch.randint(100, (21,), generator=torch.Generator().manual_seed(1)).tolist()
    own_expected, expected = (
        paged_logits(load_base_model(EngineConfig(str(each), device="cpu")), [sequence])[0]
        for each in (path, with_rounded_halves(path, tmp_path / "rounded", weight_format))
    )
    config = EngineConfig(
        str(path),
        device="cpu",
        speculation=(f"quantized:{weight_format}",),
        tensor_parallel_size=2,
    )

    def logits(base: BaseModel, _rank: int) -> tuple[Tensor, Tensor, int]:
        with RoundedLinears(base).only():
            drafts = paged_logits(base, [sequence])[0]
        return drafts, paged_logits(base, [sequence])[0], base.rounded_bytes

    (drafts, own, num_bytes), (*_, num_bytes_of_other) = run_sharded(config, 2, logits)
    assert (own - own_expected).abs().max() < 1e-4 * own.abs().max()
    error = (drafts - expected).abs().max()  # inputs may be rounded to 16 bits
    assert error < 1e-3 * expected.abs().max()
    assert (drafts - own).abs().max() > 20 * error
    assert num_bytes == num_bytes_of_other > 0


def with_rounded_halves(path: Path, folder: Path, weight_format: WeightFormat) -> Path:
    """A copy of the checkpoint, whose linear layers are rounded as two ranks round their parts."""
    shutil.copytree(path, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, weight in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            halves = weight.chunk(2, dim=1)
        elif name.endswith("_proj.weight"):
            halves = weight.chunk(2, dim=0)
        else:
            continue
        rounded = [quantize(half.contiguous(), weight_format).dequantize() for half in halves]
        tensors[name] = torch.cat(rounded, dim=1 if len(weight) == len(halves[0]) else 0)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.INT8])
def test_experts_draft_and_answer_as_in_plain_decoding(
    quantization: Quantization, tmp_path: Path
) -> None:
    base = save_family(tmp_path / "base", *SERVED["mixtral"])
    adapters = [make_adapter(base, tmp_path / "adapter", seed=1, r=3)]
    config = {"quantization": quantization, "max_model_len": 64}
    plain, _, _ = answer_all(LocalEngine(base, tmp_path, **config), adapters, 0.9)
    engine = LocalEngine(base, tmp_path, speculation=("quantized:int4",), **config)
    tokens, num_drafted, num_accepted = answer_all(engine, adapters, 0.9)
    assert tokens == plain
    assert num_accepted > 0.1 * num_drafted > 0
