"""Published weights and a published adapter against transformers with PEFT.

    make real-check MODEL=./llama ADAPTER=./adapter [ARGS='--dtype bfloat16 --quantize int8']

Serves the base and the adapter in one batch and lets both answer the prompts greedily. Then
transformers and PEFT, in float32, read prompts and answers at once. The JSON says for the base and
for the adapter how far the log-probabilities of the generated tokens are from theirs, at most and
in the mean, and at how many places the most likely token is another. It fails if the largest
distance is more than the dtype's bound (`BOUNDS`); with --quantize no bound applies. The machine
needs memory for the base in float32.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from loraplex.adapters.errors import AdapterError
from loraplex.engine.checkpoint.files import locate_base
from loraplex.engine.config import Quantization
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.text.tokenizer import Tokenizer
from support.engine import MIB, LocalEngine

BOUNDS: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.25}
"""Of a log-probability, in nats."""
PROMPTS = (
    "The capital of France is",
    "Write a SQL query that lists all customers.",
    "def fibonacci(n):",
    "Water boils at",
)
NUM_TOKENS = 32
"""Of each answer."""
BASE, ADAPTER = "base", "adapter"


class Said(NamedTuple):
    """One answer: its tokens and their log-probabilities."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]


def check(
    model: Path, adapter: Path, *, reference: Path | None = None, **settings: object
) -> dict[str, Any]:
    """`settings`: further fields of EngineConfig. `reference`: the adapter that PEFT reads, if it
    is another.

    Raises UnsupportedModel or AdapterError for what is not served.
    """
    with tempfile.TemporaryDirectory() as blocks:
        said = _answers(model, adapter, Path(blocks), settings)
    gc.collect()  # the served weights, before those of the reference are loaded
    return {who: _distance(said[who], _reference(model, who, reference or adapter)) for who in said}


def _answers(
    model: Path, adapter: Path, blocks: Path, settings: Mapping[str, object]
) -> dict[str, list[Said]]:
    """Of the base and of the adapter, in one batch."""
    size = sum(path.stat().st_size for path in adapter.glob("*.safetensors"))
    pools = {"kv_cache_bytes": 512 * MIB, "arena_bytes": 4 * size + 16 * MIB}
    engine = LocalEngine(
        model, blocks, **{**pools, "host_cache_bytes": 4 * size + 16 * MIB, **settings}
    )
    key, tokenizer = engine.add_adapter(adapter), Tokenizer(model)
    asked = {
        who: [
            engine.submit(
                tokenizer.encode(prompt),
                key if who == ADAPTER else None,
                max_tokens=NUM_TOKENS,
                num_logprobs=1,
                ignore_eos=True,
            )
            for prompt in PROMPTS
        ]
        for who in (BASE, ADAPTER)
    }
    engine.run()
    engine.close()
    return {who: list(_said(engine, tokenizer, names)) for who, names in asked.items()}


def _said(engine: LocalEngine, tokenizer: Tokenizer, names: Sequence[str]) -> Iterator[Said]:
    for prompt, name in zip(PROMPTS, names, strict=True):
        answer = engine.answers[name]
        assert answer.end.error is None, answer.end.error
        logprobs = [entry.chosen.logprob for entry in answer.logprobs]
        tokens = [token for event in answer.tokens for token in event.token_ids]
        yield Said(list(tokenizer.encode(prompt)), tokens, logprobs)


def _reference(model: Path, who: str, adapter: Path) -> torch.nn.Module:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    read: torch.nn.Module = PeftModel.from_pretrained(base, adapter) if who == ADAPTER else base
    return read.eval()


def _distance(said: Sequence[Said], model: torch.nn.Module) -> dict[str, Any]:
    distances: list[float] = []
    num_others = 0
    for answer in said:
        tokens = torch.tensor([answer.prompt + answer.token_ids])
        with torch.inference_mode():
            logprobs = model(tokens).logits[0].float().log_softmax(-1)
        expected = logprobs[len(answer.prompt) - 1 : -1]
        chosen = torch.tensor(answer.token_ids)
        theirs = expected[torch.arange(len(chosen)), chosen]
        distances += (theirs - torch.tensor(answer.logprobs)).abs().tolist()
        num_others += int((expected.argmax(-1) != chosen).sum())
    return {
        "num_tokens": len(distances),
        "largest": max(distances),
        "mean": sum(distances) / len(distances),
        "other_top_tokens": num_others,
    }


def main() -> int:
    """The exit code: 1 beyond the bound or if the base or the adapter is not served."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--dtype", choices=list(BOUNDS), default="float32")
    parser.add_argument("--quantize", type=Quantization, default=Quantization.NONE)
    asked = parser.parse_args()
    report: dict[str, Any] = {"model": asked.model, "adapter": str(asked.adapter)}
    report |= {"dtype": asked.dtype, "quantize": asked.quantize}
    try:
        found = check(
            locate_base(asked.model), asked.adapter, dtype=asked.dtype, quantization=asked.quantize
        )
    except (UnsupportedModel, AdapterError) as exc:
        print(json.dumps({**report, "refused": str(exc), "code": exc.code}, indent=2))
        return 1
    bound = BOUNDS[asked.dtype] if asked.quantize is Quantization.NONE else None
    is_good = bound is None or max(part["largest"] for part in found.values()) <= bound
    print(json.dumps({**report, **found, "bound": bound, "is_good": is_good}, indent=2))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
