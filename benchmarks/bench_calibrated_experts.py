"""What calibration is worth for experts: a small MoE quantized with each method.

    python -m benchmarks.bench_calibrated_experts [--style STYLE] [--json FILE]

The model is the demo's base. Its MLPs become experts, which begin as random rows of them, and all
is trained further on the demo's task. So its activations are those of a trained model, and some
experts get few tokens. The KL divergence is that of the next token on held-out requests, the same
for all. `--style` calibrates with answers in one style alone; the held-out ones are in all styles.
The arm `own` is gptq with hessians of each expert's own tokens alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from loraplex.api.demo.manifest import WEIGHTS
from loraplex.api.demo.task import Style, training_requests
from loraplex.engine.calibration import layer_experts
from loraplex.engine.calibration.method import Method
from loraplex.engine.calibration.quantization import quantize_model
from loraplex.engine.calibration.recipe import Recipe
from loraplex.engine.checkpoint.weights import load_config, load_weights
from loraplex.engine.text.tokenizer import Tokenizer

CPU = torch.device("cpu")
LENGTH = 128
BATCH = 16
NUM_HELD_OUT = 32
TRAINED_SEED, TEXT_SEED, HELD_OUT_SEED = 5, 9, 13
ARMS = {"rtn": Method.RTN, "awq": Method.AWQ, "own": Method.GPTQ, "gptq": Method.GPTQ}


@dataclass(frozen=True)
class Result:
    """One method with so many calibration samples of 128 tokens."""

    arm: str
    num_samples: int
    error: float
    """Of a layer's output, relative, for the calibration samples; the mean of the layers."""
    divergence: float
    """Nats, on the held-out requests."""
    num_bytes: int
    original_bytes: int


def texts(seed: int, styles: Sequence[Style] = tuple(Style)) -> Iterator[str]:
    """Requests with answers in these styles by turns."""
    for index, request in enumerate(training_requests(seed)):
        yield request.prompt + request.answer(styles[index % len(styles)])


def token_rows(tokenizer: Tokenizer, seed: int, count: int, length: int) -> Tensor:
    """int64 `[count, length]`."""
    tokens: list[int] = []
    for text in texts(seed):
        if len(tokens) >= count * length:
            break
        tokens += tokenizer.encode(text + "\n", add_special_tokens=False)
    return torch.tensor(tokens[: count * length]).view(count, length)


def make_model(folder: Path, *, num_experts: int, steps: int) -> None:
    """Write the trained model."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(WEIGHTS / "base", dtype=torch.float32)
    kept = base.config.to_dict()
    size = kept["intermediate_size"] // 3
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    config = Qwen3MoeConfig(
        **{name: kept[name] for name in (*names, "num_key_value_heads", "tie_word_embeddings")},
        num_experts=num_experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        moe_intermediate_size=size,
        pad_token_id=kept["pad_token_id"],
        bos_token_id=None,
        eos_token_id=kept["eos_token_id"],
        dtype="float16",
    )
    model: Any = AutoModelForCausalLM.from_config(config).float()
    model.load_state_dict(base.state_dict(), strict=False)
    for layer, dense in zip(model.model.layers, base.model.layers, strict=True):
        _divide(layer.mlp.experts, dense.mlp, size)
    tokens = token_rows(Tokenizer(WEIGHTS / "base"), TRAINED_SEED, steps * BATCH, LENGTH // 2)
    _train(model, tokens.view(steps, BATCH, -1))
    model.half().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(WEIGHTS / "base" / name, folder)


@torch.no_grad()
def _divide(experts: Any, mlp: Any, size: int) -> None:
    """Give each expert some rows of the MLP; two of them add up to about its output."""
    for expert in range(len(experts.down_proj)):
        rows = torch.randperm(len(mlp.up_proj.weight))[:size]
        gate_up = torch.cat([mlp.gate_proj.weight[rows], mlp.up_proj.weight[rows]])
        experts.gate_up_proj[expert] = gate_up
        experts.down_proj[expert] = 2 * mlp.down_proj.weight[:, rows]


def _train(model: Any, batches: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / len(batches))
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def log_probabilities(folder: Path, rows: Tensor) -> Tensor:
    """`[rows, length, vocab]` of a checkpoint, quantized or not."""
    model = load_weights(folder, load_config(folder), torch.float32, CPU)
    logits = [model(input_ids=row[None], use_cache=False).logits for row in rows]
    return torch.cat(logits).log_softmax(-1)


def measure(model: Path, arm: str, num_samples: int, rows: Tensor, expected: Tensor) -> Result:
    """Quantize the model to int4 in groups of 32."""
    recipe = Recipe(
        method=ARMS[arm], group_size=32, num_samples=num_samples, sequence_length=LENGTH
    )
    alone = mock.patch.object(layer_experts, "_SHARED_WEIGHT", 1e-9)
    with tempfile.TemporaryDirectory() as folder, alone if arm == "own" else nullcontext():
        out = Path(folder) / "out"
        done = quantize_model(model, out, model.parent / "text.txt", recipe, device=CPU)
        found = log_probabilities(out, rows)
    divergence = float((expected.exp() * (expected - found)).sum(-1).mean())
    error = sum(done.errors.values()) / len(done.errors)
    return Result(arm, num_samples, error, divergence, done.num_bytes, done.original_bytes)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--samples", type=int, nargs="+", default=[4, 16, 128])
    parser.add_argument("--style", type=Style, choices=list(Style))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model, text = Path(folder) / "model", Path(folder) / "text.txt"
        make_model(model, num_experts=args.experts, steps=args.steps)
        styles = (args.style,) if args.style else tuple(Style)
        text.write_text("\n".join(islice(texts(TEXT_SEED, styles), 60 * max(args.samples))))
        rows = token_rows(Tokenizer(model), HELD_OUT_SEED, NUM_HELD_OUT, LENGTH)
        expected = log_probabilities(model, rows)
        results = []
        for num_samples in args.samples:
            for arm in ARMS:
                results.append(measure(model, arm, num_samples, rows, expected))
                print(json.dumps(asdict(results[-1])), flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
