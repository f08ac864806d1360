"""Adapters that PEFT trained on a base with another number of tokens."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from loraplex.adapters.examination import IntakeReport, examine
from loraplex.adapters.layout import BaseLayout
from support.families import VOCAB_SIZE
from support.features import load_plain

NUM_ADDED = 3
ADDED = list(range(VOCAB_SIZE, VOCAB_SIZE + NUM_ADDED))
ENDS = ["embed_tokens", "lm_head"]


class Recipe(NamedTuple):
    """How a trainer added tokens."""

    lora: dict[str, Any]
    """Arguments of LoraConfig."""
    num_added: int = NUM_ADDED


RECIPES: dict[str, Recipe] = {
    "rows of the resized matrices": Recipe({}),
    "trained rows": Recipe({"trainable_token_indices": ADDED}),
    "trained rows, old and new": Recipe({"trainable_token_indices": [5, *ADDED]}),
    "rows of both ends": Recipe(
        {"trainable_token_indices": {"embed_tokens": ADDED, "lm_head": ADDED}}
    ),
    "whole ends": Recipe({"modules_to_save": ENDS}),
    "whole embedding": Recipe({"modules_to_save": ["embed_tokens"]}),
    "more rows": Recipe({}, num_added=7),
    "fewer tokens than the base": Recipe({"modules_to_save": ENDS}, num_added=-4),
    "fewer rows, not trained": Recipe({}, num_added=-5),
    "fewer rows, some trained": Recipe({"trainable_token_indices": [5, 99]}, num_added=-3),
}


def save_resized(base: Path, path: Path, recipe: Recipe, *, seed: int) -> PeftModel:
    """Train the adapter, save it as PEFT does by default, and return PEFT's own model of it."""
    model = load_plain(base)
    num_tokens = model.config.vocab_size + recipe.num_added
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's remarks on resized and tied embeddings
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
        lora = {"target_modules": ["q_proj"], **recipe.lora}
        tuned = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, **lora))
        with torch.no_grad():
            for name, parameter in tuned.named_parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape) * 0.1
                    parameter.copy_(noise if "lora_" in name else parameter + noise)
        tuned.save_pretrained(path)
    return tuned.eval()


def save_tokenizer(base: Path, path: Path, added: Sequence[AddedToken], *, end: str = "") -> None:
    """Save the base's tokenizer with these tokens beside an adapter, as a trainer does; `end`: the
    one that ends an answer."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    tokenizer.add_tokens(list(added))
    if end:
        tokenizer.eos_token = end
    tokenizer.save_pretrained(path)


def examine_resized(path: Path, output: Path, layout: BaseLayout) -> IntakeReport:
    """Examine the adapter in the folder `path`; its block is then at `output`."""
    return examine(
        path / "adapter_config.json",
        path / "adapter_model.safetensors",
        output,
        layout=layout,
        serving_dtype="float32",
        max_full_matrix_bytes=1 << 20,
    )
