"""The contents of a block, compared with the change that PEFT merges into the base."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from loraplex.adapters.block import BlockPlan, ExtraKind, read_block_header
from loraplex.adapters.layout import BaseLayout, SliceKind
from support.feature_files import FeatureFiles
from support.models import make_adapter
from support.peft_features import TRAINED_TOKENS

Array = npt.NDArray[np.floating]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> FeatureFiles:
    return FeatureFiles(tmp_path_factory.mktemp("features"))


def deltas_of_block(path: Path, layout: BaseLayout) -> dict[str, Array]:
    """scale·B·A by slice: `[out, in]`, `[experts, out, in]`, of an embedding `[tokens, out]`."""
    header = read_block_header(path)
    assert header.dtype == "F32"
    payload = np.fromfile(path, np.float32, offset=header.payload_offset)
    table = BlockPlan(layout, header.ranks, header.auxiliary).table
    deltas: dict[str, Array] = {}
    for index, rank in header.ranks.items():
        part, count = layout.slices[index], layout.slices[index].num_experts
        a_offset, b_offset, _ = table[index]
        a = payload[a_offset : a_offset + count * rank * part.in_features]
        b = payload[b_offset : b_offset + count * rank * part.out_features]
        scale = np.float32(header.scales[index])
        if part.kind is SliceKind.EMBEDDING:
            deltas[part.name] = scale * a.reshape(-1, rank) @ b.reshape(rank, -1)
            continue
        per_expert = [
            scale * up.reshape(rank, -1).T @ down.reshape(rank, -1)
            for down, up in zip(np.split(a, count), np.split(b, count), strict=True)
        ]
        is_stacked = part.kind is SliceKind.EXPERTS
        deltas[part.name] = np.stack(per_expert) if is_stacked else per_expert[0]
    return deltas


def deltas_of_peft(base: Path, adapter: Path) -> dict[str, Array]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    return dict(_peft_deltas(model))


def _peft_deltas(model: Any) -> Iterator[tuple[str, Array]]:
    for name, module in model.base_model.model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        delta = module.get_delta_weight("default").detach().numpy()
        path = name.replace(".base_layer", "")
        if isinstance(module, ParamWrapper) and module.parameter_name != "weight":
            path = f"{path}.{module.parameter_name}"
            if getattr(module.get_base_layer(), "is_transposed", False):
                delta = delta.transpose(0, 2, 1)
        yield path, delta


@pytest.mark.parametrize(
    "feature", ["lora", "output_head", "embedding", "tied_adapters", "router", "experts"]
)
def test_block_holds_the_change_that_peft_merges(
    feature: str, files: FeatureFiles, tmp_path: Path
) -> None:
    report = files.examine(feature, tmp_path / "block")
    expected = deltas_of_peft(files.base(feature), files.adapter(feature))
    actual = deltas_of_block(tmp_path / "block", files.layout(feature))
    assert actual.keys() == expected.keys()
    for name, delta in expected.items():
        np.testing.assert_allclose(actual[name], delta, atol=1e-6)
    norms = {name: float(np.linalg.norm(delta)) for name, delta in expected.items()}
    assert report.delta_norm == pytest.approx(np.linalg.norm(list(norms.values())), rel=1e-5)
    for largest in report.largest_deltas:
        assert largest.norm == pytest.approx(norms[largest.module], rel=1e-5)


EXPERT_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "everything, as PEFT expands it": (
        "experts",
        {"target_modules": "all-linear", "use_rslora": True},
    ),
    "one parameter": ("experts", {"target_parameters": ["experts.down_proj"]}),
    "rank and alpha by parameter": (
        "experts",
        {
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
            "rank_pattern": {"experts.gate_up_proj": 3, "down_proj": 5},
            "alpha_pattern": {"down_proj": 1},
        },
    ),
    "the router by its parameter's name": (
        "experts",
        {"target_parameters": ["gate.weight"], "rank_pattern": {"gate.weight": 2, "gate": 7}},
    ),
    "stored in the other order": (
        "router_extras",
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj", "router.weight"]},
    ),
}


@pytest.mark.parametrize(("feature", "lora"), EXPERT_VARIANTS.values(), ids=EXPERT_VARIANTS.keys())
def test_block_holds_what_peft_merges_into_experts(
    feature: str, lora: dict[str, Any], files: FeatureFiles, tmp_path: Path
) -> None:
    base = files.base(feature)
    settings = {"target_modules": ["q_proj"], **lora}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT looks for the patterns' keys among modules only
        adapter = make_adapter(base, tmp_path / "adapter", seed=3, **settings)
    report = files.examine(feature, tmp_path / "block", folder=adapter)
    expected = deltas_of_peft(base, adapter)
    actual = deltas_of_block(tmp_path / "block", files.layout(feature))
    assert actual.keys() == expected.keys()
    for name, delta in expected.items():
        np.testing.assert_allclose(actual[name], delta, atol=2e-6)
    assert report.delta_norm == pytest.approx(
        np.linalg.norm([np.linalg.norm(delta) for delta in expected.values()]), rel=1e-5
    )


EXTRA_NAMES = {
    ExtraKind.MAGNITUDE: "lora_magnitude_vector",
    ExtraKind.LORA_BIAS: "lora_B.bias",
    ExtraKind.MATRIX: "weight",
    ExtraKind.TOKEN_ROWS: "token_adapter.trainable_tokens_delta",
}


@pytest.mark.parametrize("feature", ["dora", "lora_bias", "bias", "full_matrix", "token_rows"])
def test_block_holds_the_extras_as_they_were_trained(
    feature: str, files: FeatureFiles, tmp_path: Path
) -> None:
    files.examine(feature, tmp_path / "block")
    layout = files.layout(feature)
    tensors = load_file(files.adapter(feature) / "adapter_model.safetensors")
    header = read_block_header(tmp_path / "block")
    payload = np.fromfile(tmp_path / "block", np.float32, offset=header.payload_offset)
    placed = BlockPlan(layout, header.ranks, header.auxiliary).placed_auxiliary
    found = set()
    for extra, offset in ((part.extra, part.offset) for part in placed):
        values = payload[offset : offset + extra.num_elements].reshape(extra.shape)
        prefix = f"base_model.model.{layout.slices[extra.slice_index].name}."
        leaf = EXTRA_NAMES.get(extra.kind, "bias")
        name = f"{prefix}{leaf}"
        if name not in tensors:
            name = f"{prefix}base_layer.{leaf}"
        found.add(name)
        expected = tensors[name]
        if extra.kind is ExtraKind.TOKEN_ROWS:
            assert extra.token_ids == tuple(sorted(TRAINED_TOKENS))
            expected = expected[[TRAINED_TOKENS.index(token) for token in extra.token_ids]]
        np.testing.assert_array_equal(values, expected)
    products = (".lora_A.", ".lora_B.weight", ".lora_embedding_")
    assert found == {name for name in tensors if not any(part in name for part in products)}


def test_rows_of_a_tied_embedding_stand_in_the_block_for_the_head_too(
    files: FeatureFiles, tmp_path: Path
) -> None:
    base = files.base("tied_adapters")
    layout = files.layout("tied_adapters")
    adapter = make_adapter(
        base, tmp_path / "adapter", seed=3, trainable_token_indices=TRAINED_TOKENS
    )
    files.examine("tied_adapters", tmp_path / "block", folder=adapter)
    header = read_block_header(tmp_path / "block")
    payload = np.fromfile(tmp_path / "block", np.float32, offset=header.payload_offset)
    embedding, head = BlockPlan(layout, header.ranks, header.auxiliary).placed_auxiliary
    assert (embedding.extra.slice_index, head.extra.slice_index) == (0, len(layout.slices) - 1)
    size = embedding.extra.num_elements
    np.testing.assert_array_equal(
        payload[embedding.offset : embedding.offset + size],
        payload[head.offset : head.offset + size],
    )
    assert payload[head.offset : head.offset + size].any()
