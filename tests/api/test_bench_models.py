"""The benchmark's models load like any other, and every requested token is text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from loraplex.api.bench.models import (
    BaseShape,
    llama_config,
    make_adapter,
    make_base,
    text_token_ids,
)

SHAPE = BaseShape(
    vocab_size=400,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_model_len=64,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    make_base(path / "base", SHAPE)
    make_adapter(path / "adapter", SHAPE, rank=4, seed=1)
    return path


def test_default_shape_has_125_million_parameters() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(BaseShape()))
    assert sum(p.numel() for p in model.parameters()) == 124_668_672


def test_every_prompt_token_decodes_to_letters_and_back(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    for token_id in text_token_ids(SHAPE):
        text = tokenizer.decode([token_id])
        assert text.isascii()
        assert text.isalpha()
        assert tokenizer.encode(text) == [token_id]


def test_the_base_never_prefers_a_token_that_is_no_text(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    tokens = torch.tensor([list(text_token_ids(SHAPE))[:60]])
    with torch.no_grad():
        best = model(tokens).logits.argmax(-1)
    assert int(best.min()) >= text_token_ids(SHAPE).start


def test_the_adapter_fits_every_linear_layer_and_has_an_effect(folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    tokens = torch.tensor([[300, 301, 302]])
    with torch.no_grad():
        plain = base(tokens).logits
        model = PeftModel.from_pretrained(base, folder / "adapter")
        adapted = model(tokens).logits
    lora = [name for name, _ in model.named_parameters() if "lora_B" in name]
    assert len(lora) == 7 * SHAPE.num_layers
    assert all(bool(p.any()) for name, p in model.named_parameters() if "lora_" in name)
    assert not torch.equal(plain, adapted)


def test_models_that_are_there_are_kept_and_others_are_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "adapter"
    weights = path / "adapter_model.safetensors"
    make_adapter(path, SHAPE, rank=4, seed=1)
    first = weights.stat().st_mtime_ns, weights.read_bytes()
    make_adapter(path, SHAPE, rank=4, seed=1)
    assert (weights.stat().st_mtime_ns, weights.read_bytes()) == first
    make_adapter(path, SHAPE, rank=4, seed=2)
    assert weights.read_bytes() != first[1]
