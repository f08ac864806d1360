"""Random Medusa heads, and training texts for the demo base."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from loraplex.api.demo.task import Style, training_requests
from loraplex.engine.checkpoint.base_identity import compute_base_id
from loraplex.engine.speculation.medusa_checkpoint import save_heads
from loraplex.engine.speculation.medusa_heads import MedusaHeads, untrained_heads


def make_heads(
    hidden_size: int, vocab_size: int, *, num_heads: int, num_layers: int = 1, seed: int = 0
) -> MedusaHeads:
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) * 0.5

    return MedusaHeads(
        randn(num_layers, num_heads, hidden_size, hidden_size),
        randn(num_layers, num_heads, hidden_size),
        randn(num_heads, vocab_size, hidden_size),
    )


def write_demo_texts(path: Path, count: int, *, seed: int = 3) -> Path:
    """Requests of the demo's task with the base's own kind of answer, as lines of messages."""
    with path.open("w") as file:
        for request in islice(training_requests(seed), count):
            messages = [
                {"role": "user", "content": request.prompt},
                {"role": "assistant", "content": request.answer(Style.ECHO)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def save_untrained_heads(base: Path, path: Path, *, num_heads: int = 3) -> None:
    """Heads that equal the base's own output head: they are right where its output repeats."""
    head = AutoModelForCausalLM.from_pretrained(base).get_output_embeddings()
    heads = untrained_heads(head, num_heads=num_heads, num_layers=1)
    save_heads(heads, path, base_id=compute_base_id(base))
