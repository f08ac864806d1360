"""Small random base models and PEFT adapters on disk, loaded by the same code as real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR_TARGETS = (*ATTENTION_TARGETS, "gate_proj", "up_proj", "down_proj")


def save_byte_tokenizer(path: Path) -> int:
    """Write a tokenizer with one token per byte and a chat template; return its vocabulary size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, *SPECIAL_TOKENS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
    return len(vocab)


def make_tiny_llama(path: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A random 2-layer Llama with a byte tokenizer: loads in well under a second."""
    vocab_size = save_byte_tokenizer(path)
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "eos_token_id": vocab_size - len(SPECIAL_TOKENS),
        "bos_token_id": None,
        **overrides,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(path)
    return path


def make_adapter(base: Path, path: Path, *, seed: int, scale: float = 0.2, **lora: Any) -> Path:
    """A random adapter written by PEFT itself: both A and B are drawn, so it has an effect.

    `lora` goes to `LoraConfig`; the default is rank 4 on every linear layer of a Llama. The same
    adapter of the same base is computed once in a process.
    """
    settings = {"r": 4, "lora_alpha": 8, "target_modules": list(ALL_LINEAR_TARGETS), **lora}
    weights = base / "model.safetensors"
    try:
        made = (str(weights), weights.stat().st_mtime_ns, seed, scale, json.dumps(settings))
    except (FileNotFoundError, TypeError):  # of several files; with settings that are no JSON
        return _save_adapter(base, path, seed, scale, settings)
    if made not in _ADAPTERS:
        _save_adapter(base, path, seed, scale, settings)
        _ADAPTERS[made] = {file.name: file.read_bytes() for file in path.iterdir()}
    path.mkdir(parents=True, exist_ok=True)
    for name, content in _ADAPTERS[made].items():
        (path / name).write_bytes(content)
    return path


_ADAPTERS: dict[tuple[object, ...], dict[str, bytes]] = {}
"""The files of each adapter that was made."""


def _save_adapter(
    base: Path, path: Path, seed: int, scale: float, settings: dict[str, Any]
) -> Path:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):  # whether or not it is made, others draw the same
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    save_without_card(model, path)
    return path


def save_without_card(model: Any, path: Path) -> None:
    """Save a `PeftModel` without its README, which is a quarter of the work."""
    with patch.object(model, "create_or_update_model_card"):
        model.save_pretrained(path)


def read_adapter_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "adapter_config.json").read_text())
    return config
