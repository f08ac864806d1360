"""Quantized checkpoints from calibration to serving."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from loraplex.engine.calibration.method import CodeFormat, Method
from loraplex.engine.calibration.output_folder import STATE_FILE
from loraplex.engine.calibration.quantization import Outcome
from loraplex.engine.checkpoint.files import locate_base
from loraplex.engine.checkpoint.stored_weights import StoredPackedWeight, dense, stored_weights
from loraplex.engine.errors import (
    CompositeBase,
    ForeignBase,
    InvalidParameter,
    QuantizedBase,
    UnsupportedModel,
)
from support.calibration import (
    CPU,
    Interrupted,
    assert_served_as_its_values,
    differing,
    interrupt_after_the_first,
    quantize_small,
    save_with_tokenizer,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def done(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A run with GPTQ that nothing interrupted."""
    out = tmp_path_factory.mktemp("done") / "out"
    return out, quantize_small(model, out)


def test_a_quantized_checkpoint_is_served_with_the_logits_of_its_values(
    model: Path, done: tuple[Path, Outcome], tmp_path: Path
) -> None:
    out, outcome = done
    packed = [w for w in stored_weights(out).values() if isinstance(w, StoredPackedWeight)]
    assert len(packed) == outcome.num_quantized == 14
    assert {weight.packed.format for weight in packed} == {"compressed-tensors-int4"}
    assert_served_as_its_values(out, model, tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3-window", "opt", "deepseek_v3-mla"])
@pytest.mark.parametrize("code_format", [CodeFormat.INT8, CodeFormat.FP8])
def test_other_families_and_formats_are_served_with_the_logits_of_their_values(
    family: str, code_format: CodeFormat, tmp_path: Path
) -> None:
    model, out = save_with_tokenizer(tmp_path / "model", family), tmp_path / "out"
    quantize_small(model, out, code_format=code_format, group_size=8)
    assert_served_as_its_values(out, model, tmp_path / "plain")


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_transformers_reads_the_same_values(done: tuple[Path, Outcome]) -> None:
    out, _ = done
    read = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    ).state_dict()
    for name, weight in stored_weights(out).items():
        assert torch.equal(read[name], dense(weight.read(), dtype=torch.float32, device=CPU)), name


def test_gptq_changes_outputs_and_predictions_less_than_the_nearest_codes(
    model: Path, done: tuple[Path, Outcome], tmp_path: Path
) -> None:
    _, gptq = done
    plain = quantize_small(model, tmp_path / "out", method=Method.RTN)
    assert all(gptq.errors[layer] < plain.errors[layer] for layer in (0, 1))
    assert gptq.quality.divergence < plain.quality.divergence
    assert gptq.num_bytes == plain.num_bytes < gptq.original_bytes


def test_an_interrupted_run_is_continued_to_the_same_bytes(
    model: Path, done: tuple[Path, Outcome], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        quantize_small(model, out, on_layer=interrupt_after_the_first)
    with pytest.raises(ForeignBase, match=r"no config\.json"):
        locate_base(str(out))
    first = out / "model-00001-of-00003.safetensors"
    written_at = first.stat().st_mtime_ns
    outcome = quantize_small(model, out)
    assert first.stat().st_mtime_ns == written_at, "a finished layer is not quantized again"
    assert differing(out, done[0]) == []
    assert outcome == done[1]


@pytest.mark.slow
def test_awq_is_served_with_the_logits_of_its_values_and_is_continued(
    model: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    outcome = quantize_small(model, whole, method=Method.AWQ)
    with pytest.raises(Interrupted):
        quantize_small(model, out, method=Method.AWQ, on_layer=interrupt_after_the_first)
    assert quantize_small(model, out, method=Method.AWQ) == outcome
    assert differing(out, whole) == []
    assert_served_as_its_values(out, model, tmp_path / "plain")


def test_a_model_whose_scales_cannot_be_folded_is_not_quantized_with_awq(tmp_path: Path) -> None:
    model = save_with_tokenizer(tmp_path / "model", "gpt_neox")
    with pytest.raises(UnsupportedModel, match="use --method gptq"):
        quantize_small(model, tmp_path / "out", method=Method.AWQ)


def test_other_arguments_do_not_continue_a_run(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        quantize_small(model, out, on_layer=interrupt_after_the_first)
    with pytest.raises(InvalidParameter, match=r"another method \(gptq, now rtn\)"):
        quantize_small(model, out, method=Method.RTN)
    (out / STATE_FILE).write_text("{}")
    with pytest.raises(InvalidParameter, match="is damaged"):
        quantize_small(model, out)


def test_excluded_layers_stay_as_they_are(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = quantize_small(model, out, exclude=("*.down_proj", "model.layers.1.*"))
    assert outcome.num_quantized == 6
    assert outcome.errors.keys() == {0}
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "model.layers.0.mlp.down_proj"} < set(ignored)
    original, name = load_file(model / "model.safetensors"), "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(
        dense(stored_weights(out)[name].read(), dtype=torch.float32, device=CPU), original[name]
    )


def test_what_does_not_fit_is_refused(
    model: Path, done: tuple[Path, Outcome], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(InvalidParameter, match=r"text: .* tokens; 8 samples and 1 held-out"):
        quantize_small(model, out, sequence_length=4096)
    with pytest.raises(InvalidParameter, match=r"exclude: .* matches no linear layer"):
        quantize_small(model, out, exclude=("*.q_prj",))
    with pytest.raises(InvalidParameter, match="does not divide the 64 inputs of"):
        quantize_small(model, out, group_size=48)
    with pytest.raises(QuantizedBase, match="compressed-tensors-int4"):
        quantize_small(done[0], out)
    assert not out.exists()
    with pytest.raises(InvalidParameter, match="is not empty"):
        quantize_small(model, tmp_path)


def test_a_composite_model_is_refused(model: Path, tmp_path: Path) -> None:
    composite = shutil.copytree(model, tmp_path / "model")
    config = json.loads((composite / "config.json").read_text())
    (composite / "config.json").write_text(json.dumps({**config, "vision_config": {"depth": 2}}))
    with pytest.raises(CompositeBase):
        quantize_small(composite, tmp_path / "out")
