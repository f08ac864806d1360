"""Adapters of experts and routers equal PEFT, in one mixed batch with base rows."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import loraplex.engine.model.experts
from loraplex.adapters.arena import Arena
from loraplex.adapters.examination import examine
from loraplex.adapters.host_cache import HostCache
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.layout import SliceKind
from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.block_preparation import BlockPreparation
from loraplex.engine.model.whole_base import load_base_model
from loraplex.kernels.lora_batch import LoraBatchBuilder
from loraplex.kernels.quantize import WeightFormat, quantize
from support.expert_layouts import LAYOUTS, merge_experts, write_expert_adapter
from support.families import COMMON, SERVED, STATES, VOCAB_SIZE, save_family
from support.marks import PEFT_PATTERNS, marked_slow
from support.paged import paged_logits
from support.quantized import logit_bound, round_inputs
from support.quantized_checkpoints import FORMATS, gpt_oss_experts, write_checkpoint
from support.tuned import adapted_layers, make_tuned

pytestmark = PEFT_PATTERNS
TOLERANCE = 1e-4
MIB = 1 << 20
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ROUTERS = ["gate.weight", "router.weight"]
"""PEFT matches by suffix: a family has one of the two."""
FAMILIES = [
    "deepseek_v2-mla",
    "deepseek_v3-mla",
    "ernie4_5_moe",
    "glm4_moe",
    "gpt_oss-sinks-window",
    "granitemoe",
    "llama4-chunks",
    "mixtral",
    "olmoe",
    "phimoe-window",
    "qwen2_moe-window",
    "qwen3_moe",
]
LAYOUT_FAMILIES = ("mixtral", "gpt_oss-sinks-window", "jamba", "nemotron_h")
"""Gate before up, interleaved and stored in the other order, in another block, without a gate."""
SLOW_FAMILIES = {
    *("deepseek_v2-mla", "ernie4_5_moe", "glm4_moe", "granitemoe", "mixtral", "olmoe"),
    *("phimoe-window", "qwen2_moe-window"),
}
"""Families whose experts and router another one has too."""
ADAPTERS: dict[str, dict[str, Any]] = {
    "all-of-moe": {"r": 3, "target_parameters": [*EXPERTS, *ROUTERS]},
    "other-rank-with-linears": {
        "r": 8,
        "lora_alpha": 4,
        "target_parameters": EXPERTS,
        "target_modules": ["o_proj"],
    },
    "patterns": {
        "r": 2,
        "use_rslora": True,
        "rank_pattern": {"gate_up_proj": 5},
        "alpha_pattern": {"down_proj": 16},
        "target_parameters": EXPERTS,
    },
    "one-layer": {"r": 4, "target_parameters": ["layers.1.mlp.experts.down_proj"]},
    "router-only": {"r": 4, "target_parameters": ROUTERS},
    "linears-only": {"r": 4, "target_modules": ["o_proj"]},
}
ONE_LAYER = {
    "granitemoe": "layers.1.block_sparse_moe.experts.down_proj",
    "llama4-chunks": "layers.1.feed_forward.experts.down_proj",
}
"""Where the family names its experts otherwise."""


def load_dense(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()


def dense_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@dataclass
class Resident:
    """Adapters in a base's arena."""

    base: BaseModel
    arena: Arena
    rows: list[tuple[int, int]]
    """Each adapter's (row, generation)."""

    def logits(self, sequences: list[list[int]], adapters: list[int | None]) -> list[Tensor]:
        """Of all sequences in one mixed batch; adapters by their place, None for the base."""
        rows = [(-1, 0) if index is None else self.rows[index] for index in adapters]
        builder = LoraBatchBuilder(self.arena, self.base.device)
        return paged_logits(self.base, sequences, builder=builder, adapters=rows)


def make_resident(base: BaseModel, tuned: list[Any], blocks: Path) -> Resident:
    """Bring PEFT's adapters to the arena."""
    folders = []
    for adapter in tuned:
        folders.append(Path(tempfile.mkdtemp(dir=blocks)))
        adapter.save_pretrained(folders[-1], save_embedding_layers=False)
    return load_adapters(base, folders)


def load_adapters(base: BaseModel, folders: list[Path]) -> Resident:
    """Bring adapters to the arena as intake and the engine do."""
    arena = Arena(base.layout, 8 * MIB, base.dtype, base.device)
    base.attach_arena(arena)
    prepare = BlockPreparation(base.layout, base.extended, rest=lambda _seconds: None)
    host = HostCache(base.layout, 8 * MIB, base.dtype, prepare=prepare)
    rows = []
    for folder in folders:
        report = examine(
            folder / "adapter_config.json",
            folder / "adapter_model.safetensors",
            folder / "adapter.block",
            layout=base.layout,
            serving_dtype="float32",
        )
        key = AdapterKey("acme", report.digest)
        block = host.read(key, folder / "adapter.block")
        assert block is not None
        placement = arena.place(key, block.num_elements, block.table, block.auxiliary)
        assert placement is not None
        arena.copy_into(placement, block)
        arena.publish(placement)
        rows.append((placement.row, placement.generation))
    return Resident(base, arena, rows)


def draw_sequences(count: int) -> list[list[int]]:
    # In no family does this seed put a token so near between two experts that rounding decides.
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(VOCAB_SIZE, (17 + 5 * index % 11,), generator=generator).tolist()
        for index in range(count)
    ]


def check_against_peft(model: Path, adapters: list[dict[str, Any]], blocks: Path) -> None:
    base = load_base_model(EngineConfig(str(model), device="cpu"))
    tuned = [
        make_tuned(load_dense(model), seed=index, **lora) for index, lora in enumerate(adapters)
    ]
    resident = make_resident(base, tuned, blocks)
    sequences = draw_sequences(len(tuned) + 2)
    order = [None, *range(len(tuned)), None]

    logits = resident.logits(sequences, order)

    dense = load_dense(model)
    for index, tokens, ours in zip(order, sequences, logits, strict=True):
        plain = dense_logits(dense, tokens)
        expected = plain if index is None else dense_logits(tuned[index], tokens)
        if index is not None:
            assert (expected - plain).abs().max() > 100 * TOLERANCE, "it must have an effect"
        assert (ours - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", marked_slow(FAMILIES, slow=SLOW_FAMILIES))
def test_experts_and_routers_of_each_family_equal_peft_in_one_mixed_batch(
    family: str, tmp_path: Path
) -> None:
    model = save_family(tmp_path / "base", *SERVED[family])
    adapters = dict(ADAPTERS)
    if family in ONE_LAYER:
        adapters["one-layer"] = {**adapters["one-layer"], "target_parameters": [ONE_LAYER[family]]}
    check_against_peft(model, list(adapters.values()), tmp_path)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_all_linear_doubles_the_rank_of_fused_experts_and_is_served_so(
    family: str, tmp_path: Path
) -> None:
    """PEFT's "all-linear" takes experts and routers along, since they once were linear layers."""
    model = save_family(tmp_path / "base", *SERVED[family])
    adapters: list[dict[str, Any]] = [
        {"r": 3, "target_modules": "all-linear"},
        {"r": 2, "target_modules": "all-linear", "use_rslora": True},
    ]
    for lora in adapters:
        layers = adapted_layers(make_tuned(load_dense(model), seed=0, **lora))
        block = "model.layers.1.mlp."
        ranks = {
            name.removeprefix(block): layer.r["default"]
            for name, layer in layers.items()
            if name.startswith(block)
        }
        rank = lora["r"]
        assert ranks == {"gate": rank, "experts.gate_up_proj": 2 * rank, "experts.down_proj": rank}
    check_against_peft(model, adapters, tmp_path)


@pytest.mark.parametrize(
    "family",
    marked_slow(["qwen3_moe", "gpt_oss-sinks-window", "llama4-chunks"], slow={"llama4-chunks"}),
)
def test_the_matrices_in_the_arena_are_what_peft_says_the_adapter_changes(
    family: str, tmp_path: Path
) -> None:
    model = save_family(tmp_path / "base", *SERVED[family])
    base = load_base_model(EngineConfig(str(model), device="cpu"))
    lora: dict[str, Any] = {"r": 3, "lora_alpha": 5, "target_parameters": [*EXPERTS, *ROUTERS]}
    tuned = make_tuned(load_dense(model), seed=0, **lora)
    arena = make_resident(base, [tuned], tmp_path).arena
    layers = adapted_layers(tuned)
    assert len(layers) == 3 * len(base.moe_layers)
    for name, layer in layers.items():
        index = base.layout.slice_index[name]
        part = base.layout.slices[index]
        a_offset, b_offset, rank = arena.row_tables[0][index]
        num_rows = part.num_experts * rank
        a = arena.flat[a_offset : a_offset + num_rows * part.in_features]
        b = arena.flat[b_offset : b_offset + num_rows * part.out_features]
        delta = torch.einsum(
            "ero,eri->eoi",
            b.view(part.num_experts, rank, part.out_features),
            a.view(part.num_experts, rank, part.in_features),
        )
        theirs = layer.get_delta_weight("default").detach()
        if part.kind is SliceKind.LINEAR:
            theirs = theirs[None]
        elif family.startswith(("gpt_oss", "llama4")):
            theirs = theirs.transpose(1, 2)  # they store [experts, in, out]
        torch.testing.assert_close(delta, theirs)


@pytest.mark.parametrize(
    "family", marked_slow(LAYOUT_FAMILIES, slow={*LAYOUT_FAMILIES} - {"mixtral"})
)
def test_all_layouts_of_experts_equal_merged_models_in_one_mixed_batch(
    family: str, tmp_path: Path
) -> None:
    path = save_family(tmp_path / "base", *{**SERVED, **STATES}[family])
    base = load_base_model(EngineConfig(str(path), device="cpu"))
    dense = load_dense(path)
    folders = [
        write_expert_adapter(tmp_path / name, layout, dense, seed=seed)
        for seed, (name, layout) in enumerate(LAYOUTS.items())
    ]
    resident = load_adapters(base, folders)
    sequences = draw_sequences(len(folders) + 1)
    logits = resident.logits(sequences, [*range(len(folders)), None])
    models = [*(merge_experts(dense, folder) for folder in folders), dense]
    for tokens, ours, model in zip(sequences, logits, models, strict=True):
        expected = dense_logits(model, tokens)
        if model is not dense:
            assert (expected - dense_logits(dense, tokens)).abs().max() > 100 * TOLERANCE
        assert (ours - expected).abs().max() < TOLERANCE


def test_experts_whose_matrices_have_one_shape_are_told_apart_by_their_order(
    tmp_path: Path,
) -> None:
    model_type, sizes = STATES["nemotron_h"]
    square = {**sizes, "moe_intermediate_size": COMMON["hidden_size"]}
    model = save_family(tmp_path / "base", model_type, square)
    both = ["experts.up_proj", "experts.down_proj"]
    layout = load_base_model(EngineConfig(str(model), device="cpu")).layout
    shapes = {
        (part.in_features, part.out_features)
        for part in layout.slices
        if part.kind is SliceKind.EXPERTS
    }
    assert len(shapes) == 1
    adapters: list[dict[str, Any]] = [
        {"target_parameters": both},
        {"target_parameters": both[1:]},
        {"target_parameters": both, "rank_pattern": {"down_proj": 2}},
    ]
    check_against_peft(model, adapters, tmp_path)


def test_routers_and_experts_stand_in_the_layout_where_they_run(tmp_path: Path) -> None:
    path = save_family(tmp_path, *SERVED["gpt_oss-sinks-window"])
    layout = load_base_model(EngineConfig(str(path), device="cpu")).layout
    block = "model.layers.1."
    parts = [part for part in layout.slices if part.name.startswith(block)]
    assert [part.name.removeprefix(block) for part in parts][3:] == [
        "self_attn.o_proj",
        "mlp.router",
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    ]
    router, up, down = parts[4:]
    assert (router.kind, router.in_features, router.out_features) == (SliceKind.LINEAR, 64, 4)
    assert (up.kind, up.in_features, up.out_features) == (SliceKind.EXPERTS, 64, 192)
    assert (down.kind, down.in_features, down.out_features) == (SliceKind.EXPERTS, 96, 64)
    assert (up.num_experts, down.num_experts) == (4, 4)
    assert all(len(projection.slices) == 1 for projection in layout.projections[-3:])
    assert not any("mlp" in name for name in layout.refused)


def test_shared_experts_and_dense_layers_of_an_moe_model_are_ordinary_linears(
    tmp_path: Path,
) -> None:
    model = save_family(tmp_path / "base", *SERVED["deepseek_v3-mla"])
    linears = ["gate_proj", "up_proj", "down_proj"]
    check_against_peft(model, [{"target_modules": linears, "target_parameters": EXPERTS}], tmp_path)


def test_experts_share_a_batch_with_the_other_features_of_adapters(tmp_path: Path) -> None:
    model = save_family(tmp_path / "base", *SERVED["qwen3_moe"])
    adapters: list[dict[str, Any]] = [
        {"target_modules": ["lm_head", "q_proj"], "target_parameters": EXPERTS},
        {"target_modules": ["o_proj"], "use_dora": True},
        {"target_modules": ["embed_tokens"], "target_parameters": ROUTERS},
    ]
    check_against_peft(model, adapters, tmp_path)


def test_experts_that_transformers_computes_in_its_own_way_are_refused(tmp_path: Path) -> None:
    path = save_family(tmp_path, *SERVED["jetmoe"])
    layout = load_base_model(EngineConfig(str(path), device="cpu")).layout
    reason = "LoRA on JetMoeParallelExperts is not served"
    assert layout.refused["model.layers.0.mlp.input_linear"] == reason
    assert not any(part.kind is SliceKind.EXPERTS for part in layout.slices)


def test_a_router_that_multiplies_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    once = Qwen3MoeTopKRouter.forward

    def twice(self: Any, hidden_states: Tensor) -> Any:
        torch.nn.functional.linear(hidden_states, self.weight)
        return once(self, hidden_states)

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", twice)
    path = save_family(tmp_path, *SERVED["qwen3_moe"])
    layout = load_base_model(EngineConfig(str(path), device="cpu")).layout
    assert layout.refused["model.layers.0.mlp.gate"] == ("LoRA on Qwen3MoeTopKRouter is not served")
    assert "model.layers.0.mlp.experts.down_proj" in layout.slice_index
    assert "model.layers.0.mlp.gate" not in layout.slice_index


@pytest.mark.parametrize("parameter", EXPERTS)
def test_what_overflows_in_one_adapters_experts_leaves_other_rows_bit_equal(
    parameter: str, tmp_path: Path
) -> None:
    """In the last layer: what overflows before it goes to other experts than it would have."""
    model = save_family(tmp_path / "base", *SERVED["qwen3_moe"])
    base = load_base_model(EngineConfig(str(model), device="cpu"))
    target: dict[str, Any] = {"target_parameters": [f"layers.1.mlp.{parameter}"]}
    everything: dict[str, Any] = {"target_parameters": [*EXPERTS, *ROUTERS]}
    sequences, order = draw_sequences(3), [0, 1, None]
    logits = []
    for scale in (0.2, 1e30):
        tuned = [
            make_tuned(load_dense(model), seed=0, scale=scale, **target),
            make_tuned(load_dense(model), seed=1, r=7, **everything),
        ]
        logits.append(make_resident(base, tuned, tmp_path).logits(sequences, order))
    (modest, *before), (overflown, *after) = logits
    assert modest.isfinite().all()
    assert not overflown.isfinite().any()
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)


def test_a_router_that_overflows_for_one_adapter_leaves_the_others_right(tmp_path: Path) -> None:
    model = save_family(tmp_path / "base", *SERVED["mixtral"])
    base = load_base_model(EngineConfig(str(model), device="cpu"))
    tuned = [
        make_tuned(load_dense(model), seed=0, scale=1e30, target_parameters=ROUTERS),
        make_tuned(load_dense(model), seed=1, target_parameters=[*EXPERTS, *ROUTERS]),
    ]
    sequences = draw_sequences(3)
    overflown, *others = make_resident(base, tuned, tmp_path).logits(sequences, [0, 1, None])
    assert not overflown.isfinite().any()
    for tokens, ours, theirs in zip(
        sequences[1:], others, (tuned[1], load_dense(model)), strict=True
    ):
        assert (ours - dense_logits(theirs, tokens)).abs().max() < TOLERANCE


def test_a_step_that_touches_no_experts_runs_none_of_their_lora(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("no adapter of the step touches these experts")

    model = save_family(tmp_path / "base", *SERVED["mixtral"])
    base = load_base_model(EngineConfig(str(model), device="cpu"))
    tuned = [
        make_tuned(load_dense(model), seed=0, target_modules=["q_proj"]),
        make_tuned(load_dense(model), seed=1, target_parameters=EXPERTS),
    ]
    resident = make_resident(base, tuned, tmp_path)
    sequences = draw_sequences(2)
    monkeypatch.setattr(loraplex.engine.model.experts, "add_experts", fail)
    ours, _ = resident.logits(sequences, [0, None])
    assert (ours - dense_logits(tuned[0], sequences[0])).abs().max() < TOLERANCE
    with pytest.raises(AssertionError, match="touches these experts"):
        resident.logits(sequences, [0, 1])


def test_one_adapter_alone_changes_either_matrix_of_the_experts(tmp_path: Path) -> None:
    model = save_family(tmp_path / "base", *SERVED["mixtral"])
    dense = load_dense(model)
    tuned = [
        make_tuned(load_dense(model), seed=seed, target_parameters=[parameter])
        for seed, parameter in enumerate(EXPERTS)
    ]
    resident = make_resident(
        load_base_model(EngineConfig(str(model), device="cpu")), tuned, tmp_path
    )
    sequences = draw_sequences(2)
    for index, theirs in enumerate(tuned):
        ours, plain = resident.logits(sequences, [index, None])
        assert (ours - dense_logits(theirs, sequences[0])).abs().max() < TOLERANCE
        assert (plain - dense_logits(dense, sequences[1])).abs().max() < TOLERANCE


def test_an_adapter_that_left_changes_no_expert_any_more(tmp_path: Path) -> None:
    model = save_family(tmp_path / "base", *SERVED["qwen2_moe-window"])
    base = load_base_model(EngineConfig(str(model), device="cpu"))
    lora: dict[str, Any] = {"target_parameters": [*EXPERTS, *ROUTERS]}
    sequences = draw_sequences(2)
    for seed in (0, 1):  # both in row 0, one after the other
        tuned = make_tuned(load_dense(model), seed=seed, **lora)
        resident = make_resident(base, [tuned], tmp_path)
        ours, plain = resident.logits(sequences, [0, None])
        assert (ours - dense_logits(tuned, sequences[0])).abs().max() < TOLERANCE
        assert (plain - dense_logits(load_dense(model), sequences[1])).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3_moe", Quantization.INT8),
        ("gpt_oss-sinks-window", Quantization.INT4),
        pytest.param("mixtral", Quantization.NF4, marks=pytest.mark.slow),
        pytest.param("granitemoe", Quantization.FP8, marks=pytest.mark.slow),
        pytest.param("deepseek_v3-mla", Quantization.MXFP4, marks=pytest.mark.slow),
        pytest.param("llama4-chunks", Quantization.INT4, marks=pytest.mark.slow),
        pytest.param("llama4-chunks", Quantization.INT8, marks=pytest.mark.slow),
    ],
)
def test_a_quantized_base_computes_with_rounded_experts_and_its_routers_as_they_are(
    family: str, form: Quantization, tmp_path: Path
) -> None:
    path = save_family(tmp_path / "base", *SERVED[family])
    base = load_base_model(EngineConfig(str(path), device="cpu", quantization=form))
    plain = load_base_model(EngineConfig(str(path), device="cpu"))
    assert base.layout == plain.layout
    assert len(base.packed_experts) == sum(len(layer.experts) for layer in base.moe_layers) > 0
    num_bytes = sum(experts.weight_bytes for experts in base.packed_experts)
    num_parameters = sum(prod(experts.shape) for experts in base.packed_experts)
    bits = base.packed_experts[0].code_type.bits
    assert num_bytes <= {4: 0.30, 8: 0.55}[bits] * 2 * num_parameters
    weights = dict(plain.model.named_parameters())
    routers = [name for name in weights if name.endswith(tuple(ROUTERS))]
    assert routers
    ours = dict(base.model.named_parameters())
    assert all(torch.equal(ours[name], weights[name]) for name in routers)
    tuned = [make_tuned(rounded(path, base, form), seed=0, **ADAPTERS["all-of-moe"])]
    sequences = draw_sequences(2)
    logits = make_resident(base, tuned, tmp_path).logits(sequences, [0, None])
    models = [*tuned, rounded(path, base, form)]
    for tokens, found, model in zip(sequences, logits, models, strict=True):
        round_inputs(model, base)
        expected = dense_logits(model, tokens)
        bound = max(logit_bound(base), TOLERANCE)
        assert (found - expected).abs().max() < bound * max(float(expected.abs().max()), 1.0)


def rounded(path: Path, base: BaseModel, form: Quantization) -> Any:
    """transformers' model with the numbers of the codes, of the parts that the base quantizes."""
    model = load_dense(path)
    kept = {f"{name}.weight" for name in base.absorbed}
    with torch.no_grad():
        for name, module in model.named_modules():
            if type(module) is nn.Linear and f"{name}.weight" not in kept:
                if module is not model.get_output_embeddings():
                    module.weight.copy_(rounded_matrix(module.weight, form))
            elif hasattr(module, "down_proj") and isinstance(module.down_proj, nn.Parameter):
                is_transposed = getattr(module, "is_transposed", True)  # Llama 4's does not say
                for weight in (module.gate_up_proj, module.down_proj):
                    for matrix in weight:
                        rows = matrix.T if is_transposed else matrix
                        rows.copy_(rounded_matrix(rows.clone(), form))
    return model


def rounded_matrix(weight: Tensor, form: Quantization) -> Tensor:
    return quantize(weight.contiguous(), WeightFormat(form.value)).dequantize()


def test_adapters_over_stacked_mxfp4_experts_equal_peft_over_their_values(tmp_path: Path) -> None:
    dense = save_family(tmp_path / "dense", *SERVED["gpt_oss-sinks-window"])
    model = load_dense(dense)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_bias"):  # they begin with zeros, or close to it
                parameter.copy_(torch.randn(parameter.shape))
    model.save_pretrained(dense)
    packed = gpt_oss_experts(dense, tmp_path / "packed")
    base = load_base_model(EngineConfig(str(packed), device="cpu"))
    assert len(base.packed_experts) == 4
    names = ("all-of-moe", "patterns", "one-layer")
    tuned = [
        make_tuned(load_dense(dense), seed=seed, **ADAPTERS[name])
        for seed, name in enumerate(names)
    ]
    sequences = draw_sequences(4)
    logits = make_resident(base, tuned, tmp_path).logits(sequences, [0, 1, 2, None])
    for tokens, ours, theirs in zip(sequences, logits, (*tuned, load_dense(dense)), strict=True):
        expected = dense_logits(theirs, tokens)
        assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()


MAX_BYTES = {4: 0.41, 8: 0.60}
"""Of packed experts, over those in bf16, by the bits of a code. With groups of 16 inputs, a scale,
a zero point and the places of the inputs take much of it."""
BLOCKS_WITHIN_ROWS = {"nf4", "nf4-nested", "fp4", "ct-mxfp4"}
"""down_proj, of 48 inputs, has no form of codes there."""


@pytest.mark.parametrize(
    "name", marked_slow(FORMATS, slow=FORMATS.keys() - {"gptq-ordered", "deepseek-fp8"})
)
def test_adapters_over_quantized_experts_equal_peft_over_their_values(
    name: str, tmp_path: Path
) -> None:
    dense = save_family(tmp_path / "dense", *SERVED["qwen3_moe"])
    packed = write_checkpoint(dense, tmp_path / "packed", FORMATS[name])
    base = load_base_model(EngineConfig(str(packed), device="cpu"))
    assert len(base.packed_experts) == (2 if name in BLOCKS_WITHIN_ROWS else 4)
    for experts in base.packed_experts:
        most = MAX_BYTES[experts.code_type.bits]
        assert experts.weight_bytes <= most * 2 * prod(experts.shape)
    names = ("all-of-moe", "other-rank-with-linears")
    tuned = [
        make_tuned(load_dense(dense), seed=seed, **ADAPTERS[each])
        for seed, each in enumerate(names)
    ]
    sequences = draw_sequences(3)
    logits = make_resident(base, tuned, tmp_path).logits(sequences, [0, 1, None])
    for tokens, ours, theirs in zip(sequences, logits, (*tuned, load_dense(dense)), strict=True):
        round_inputs(theirs, base)
        expected = dense_logits(theirs, tokens)
        bound = max(logit_bound(base), TOLERANCE)
        assert (ours - expected).abs().max() < bound * expected.abs().max()
