"""Classification adapters, made with PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging

from support.peft_features import draw_trained_values


def load_classifier(base: Path, num_labels: int) -> Any:
    """transformers' own classifier over a base that was saved as a language model."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it remarks that the head is new
    try:
        model = AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=num_labels, attn_implementation="eager"
        )
    finally:
        logging.set_verbosity(verbosity)
    return model.eval()


def save_classifier(
    base: Path, path: Path, *, num_labels: int, seed: int, **lora: Any
) -> PeftModel:
    """Train the adapter, save it as PEFT does by default, and return PEFT's own model of it."""
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **lora}
    tuned = get_peft_model(
        load_classifier(base, num_labels), LoraConfig(task_type="SEQ_CLS", **settings)
    )
    draw_trained_values(tuned, seed)
    tuned.save_pretrained(path)
    return tuned.eval()


def name_labels(folder: Path, labels: list[str], **fields: Any) -> None:
    """Put the labels into the adapter's configuration, as `adapters push` does."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    numbered = {str(number): label for number, label in enumerate(labels)}
    path.write_text(json.dumps({**config, "id2label": numbered, **fields}))


def class_logits(tuned: Any, prompt: list[int]) -> Tensor:
    """`[labels]`: what transformers and PEFT give for one prompt without padding."""
    with torch.inference_mode():
        logits: Tensor = tuned(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    return logits.float()
