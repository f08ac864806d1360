"""The base with one adapter, under which heads are trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from loraplex.api.demo.manifest import WEIGHTS
from loraplex.engine.checkpoint.weights import load_config, load_weights
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.speculation.adapted_base import with_adapter
from loraplex.engine.speculation.eagle_training import read_batch
from loraplex.engine.speculation.training_texts import TrainingText

BASE, ADAPTER = WEIGHTS / "base", WEIGHTS / "pirate"
TEXTS = [TrainingText([5, 6, 7, 8, 9], 0), TrainingText([30, 31, 32], 1)]
LAYERS = (1, 2, 4)


def load_base() -> PreTrainedModel:
    return load_weights(BASE, load_config(BASE), torch.float32, torch.device("cpu"))


def merged(adapter: Path) -> PreTrainedModel:
    """The base whose weights have the adapter's products added."""
    model, config = load_base(), json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        product = tensors[name.replace("lora_A", "lora_B")].float() @ tensors[name].float()
        with torch.no_grad():
            weight = model.get_submodule(module).weight
            assert isinstance(weight, Tensor)
            weight += product * (config["lora_alpha"] / config["r"])
    return model


def test_heads_read_states_and_logits_of_the_base_with_the_adapter() -> None:
    adapted = with_adapter(load_base(), ADAPTER)
    actual, expected = (read_batch(each, LAYERS, TEXTS) for each in (adapted, merged(ADAPTER)))
    plain = read_batch(load_base(), LAYERS, TEXTS)
    for got, wanted in ((actual.states, expected.states), (actual.logits, expected.logits)):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert (actual.logits - plain.logits).abs().max() > 1.0
    assert not any(parameter.requires_grad for parameter in adapted.parameters())


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ADAPTER, tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task_type": "SEQ_CLS"}, "a classifier generates no text"),
        ({"alora_invocation_tokens": [5, 6]}, "activated LoRA"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"r": 8}, "does not fit the base"),
    ],
)
def test_an_adapter_for_which_no_head_can_be_trained_is_refused(
    adapter: Path, fields: dict[str, object], message: str
) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(InvalidParameter, match=message):
        with_adapter(load_base(), adapter)


def test_a_pickle_is_not_read(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(InvalidParameter, match=r"adapter_model\.safetensors is missing"):
        with_adapter(load_base(), adapter)


def test_an_adapter_without_all_its_tensors_is_refused(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors.pop(min(tensors))
    save_file(tensors, path)
    with pytest.raises(InvalidParameter, match="missing adapter keys"):
        with_adapter(load_base(), adapter)
