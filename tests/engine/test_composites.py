"""The text part of models for text and images, and adapters of the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from loraplex.adapters.errors import AdapterRejected
from loraplex.engine.checkpoint.files import locate_base
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import CompositeBase, DamagedBase, WeightsMissing
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.skeleton import read_skeleton
from loraplex.engine.model.whole_base import load_base_model
from support.arena import load_adapters
from support.composites import COMPOSITES, save_composite
from support.marks import marked_slow
from support.paged import paged_logits
from support.peft_features import draw_trained_values

TOLERANCE = 1e-4
SEQUENCES = ([5, 6, 7, 8, 9, 10, 11] * 4, [1, 2, 3])
TEXT_LAYERS = r".*language_model.*\.(q_proj|o_proj|down_proj)"


def load(path: Path) -> BaseModel:
    return load_base_model(EngineConfig(str(path), device="cpu"))


def whole_logits(model: Any, tokens: list[int]) -> Tensor:
    if model.config.model_type == "llama4":  # the whole class fails on text alone
        model = model.language_model
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).abs().max() < TOLERANCE * theirs.abs().max()


@pytest.mark.parametrize("case", marked_slow(COMPOSITES, slow={"llama4", "llava", "mistral3"}))
def test_a_composite_checkpoint_gives_the_whole_models_logits_of_text(
    case: str, tmp_path: Path
) -> None:
    whole = save_composite(tmp_path, case)
    base = load(locate_base(str(tmp_path)))
    for tokens, ours in zip(SEQUENCES, paged_logits(base, SEQUENCES), strict=True):
        assert_close(ours, whole_logits(whole, tokens))


def test_names_as_transformers_writes_them_since_version_5_are_read(tmp_path: Path) -> None:
    whole = save_composite(tmp_path, "gemma3")
    file = tmp_path / "model.safetensors"
    tensors = {
        name.replace("language_model.model.", "model.language_model."): tensor
        for name, tensor in load_file(file).items()
    }
    assert any(name.startswith("model.language_model.layers.") for name in tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    (ours,) = paged_logits(load(tmp_path), SEQUENCES[:1])
    assert_close(ours, whole_logits(whole, SEQUENCES[0]))


def save_adapter(whole: Any, path: Path, **lora: Any) -> Path:
    model = get_peft_model(whole, LoraConfig(r=4, lora_alpha=8, **lora))
    draw_trained_values(model, seed=3)
    model.save_pretrained(path)
    model.unload()
    return path


@pytest.mark.parametrize("case", marked_slow(COMPOSITES, slow={"llama4", "llava", "mistral3"}))
def test_adapters_of_the_whole_model_equal_peft_on_it(case: str, tmp_path: Path) -> None:
    save_composite(tmp_path / "base", case)

    def fresh() -> Any:
        return AutoModelForImageTextToText.from_pretrained(
            tmp_path / "base", attn_implementation="eager"
        ).eval()

    plain = save_adapter(fresh(), tmp_path / "plain", target_modules=TEXT_LAYERS)
    names = load_file(plain / "adapter_model.safetensors")
    assert all("language_model" in name for name in names)
    layer = next(n for n in names if ".layers.1." in n).removeprefix("base_model.model.")
    scaled = save_adapter(
        fresh(),
        tmp_path / "scaled",
        target_modules=TEXT_LAYERS,
        alpha_pattern={layer.rpartition(".lora_")[0]: 24},
    )
    base = load(tmp_path / "base")
    builder, rows = load_adapters(base, [plain, scaled], tmp_path)
    sequences = [SEQUENCES[0], SEQUENCES[1], SEQUENCES[0]]
    logits = paged_logits(base, sequences, builder=builder, adapters=[*rows, (-1, 0)])
    for folder, tokens, ours in zip([plain, scaled, None], sequences, logits, strict=True):
        tuned = fresh() if folder is None else PeftModel.from_pretrained(fresh(), folder).eval()
        assert_close(ours, whole_logits(tuned, tokens))


def test_adapters_on_other_parts_are_refused_by_name(tmp_path: Path) -> None:
    whole = save_composite(tmp_path / "base", "gemma3")
    folder = save_adapter(
        whole, tmp_path / "vision", target_modules=r".*vision_tower.*\.(q_proj|v_proj)"
    )
    base = load(tmp_path / "base")
    with pytest.raises(AdapterRejected, match="Only the text part of this base is served") as error:
        load_adapters(base, [folder], tmp_path)
    assert error.value.reason == "unsupported_module"


def test_one_matrix_under_two_names_is_refused(tmp_path: Path) -> None:
    whole = save_composite(tmp_path / "base", "gemma3")
    folder = save_adapter(whole, tmp_path / "twice", target_modules=TEXT_LAYERS)
    base = load(tmp_path / "base")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    first = min(tensors)
    tensors[first.replace("model.language_model.", "language_model.model.")] = tensors[first] + 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(AdapterRejected, match="another tensor of the adapter names the same"):
        load_adapters(base, [folder], tmp_path)

    file = tmp_path / "base" / "model.safetensors"
    stored = load_file(file)
    layer = min(name for name in stored if ".layers." in name and "language_model" in name)
    other = layer.replace("language_model.model.", "model.language_model.")
    save_file({**stored, other: stored[layer] + 1}, file, metadata={"format": "pt"})
    with pytest.raises(DamagedBase, match="under two names"):
        locate_base(str(tmp_path / "base"))


def test_the_skeleton_of_a_composite_model_is_that_of_its_text_part(tmp_path: Path) -> None:
    save_composite(tmp_path, "gemma3")
    layout = json.loads(read_skeleton(tmp_path).layout_json)
    assert layout["is_text_part"]
    served = load(tmp_path).layout
    names = [part[0] for projection in layout["projections"] for part in projection]
    assert names == [part.name for part in served.slices]


def test_a_composite_checkpoint_without_its_text_part_is_refused(tmp_path: Path) -> None:
    save_composite(tmp_path, "gemma3")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    others = {name: each for name, each in tensors.items() if "language_model" not in name}
    save_file(others, file, metadata={"format": "pt"})
    with pytest.raises(CompositeBase, match="do not name the tensors of its text part"):
        locate_base(str(tmp_path))
    some = {name: each for name, each in tensors.items() if ".layers.1.mlp" not in name}
    save_file(some, file, metadata={"format": "pt"})
    with pytest.raises(WeightsMissing, match=r"model\.layers\.1\.mlp"):
        load(locate_base(str(tmp_path)))
