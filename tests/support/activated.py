"""Activated LoRA over a small Llama, and the same adapters in PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.variants import calculate_alora_offsets
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.models import make_adapter

TOLERANCE = 1e-4
"""Of a logarithm of a probability, in fp32."""
MIN_EFFECT = 1e-2
"""An adapter changes some logit by more, else its figures would prove nothing."""


def make_activated(
    base: Path, path: Path, invocation: Sequence[int], *, seed: int, **lora: Any
) -> Path:
    """An adapter written by PEFT that acts from this invocation on."""
    return make_adapter(
        base,
        path,
        seed=seed,
        task_type="CAUSAL_LM",
        alora_invocation_tokens=list(invocation),
        **lora,
    )


@dataclass
class Reference:
    """PEFT's logits: one model for each adapter, and the base's for None."""

    models: dict[Path | None, Any]

    @classmethod
    def of(cls, base: Path, folders: Sequence[Path]) -> Reference:
        models: dict[Path | None, Any] = {None: _load(base)}
        for folder in folders:
            models[folder] = PeftModel.from_pretrained(_load(base), folder).eval()
        return cls(models)

    def logprobs(self, folder: Path | None, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """Of each token of the answer's places, `[len(answer), vocab_size]`.

        PEFT finds the invocation in the prompt alone, as its `generate` does.
        """
        tokens, model = [*prompt, *answer], self.models[folder]
        options: dict[str, Any] = {}
        if folder is not None and model.peft_config["default"].alora_invocation_tokens:
            (from_end,) = calculate_alora_offsets(
                model.peft_config, "default", torch.tensor([prompt])
            )
            # None means for PEFT's model that it is to look for the invocation itself.
            options["alora_offsets"] = [from_end and from_end + len(answer)]
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), use_cache=False, **options).logits[0]
        logprobs: Tensor = logits[len(prompt) - 1 : len(tokens) - 1].float().log_softmax(-1)
        return logprobs


def _load(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
