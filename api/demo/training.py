"""Trains and evaluates the demo's base and adapters, and writes them with their manifest.

Needs torch, transformers and PEFT; only `recipe.main` imports it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

from .corpus import Example, base_examples, copy_examples, style_examples, tokenizer_texts
from .manifest import Accuracy, write_manifest
from .muon import Muon
from .recipe import BASE_NAME, AdapterRecipe, BaseRecipe, Recipe
from .task import Style, held_out_requests
from .tokenization import Encoder, save_tokenizer, train_tokenizer

IGNORED_LABEL = -100
LOG_EVERY_STEPS = 50
SHIPPED_DTYPE = torch.float16

console = Console(stderr=True)

Batch = tuple[Tensor, Tensor]
"""Token ids and labels, both int64 [num_rows, num_tokens], padded on the right."""


def train_all(recipe: Recipe, out: Path) -> None:
    """Write `base`, one folder per adapter and `manifest.json` under `out`."""
    tokenizer = train_tokenizer(tokenizer_texts(recipe.base.seed), recipe.base.vocab_size)
    encoder = Encoder(tokenizer)
    base = train_base(recipe.base, encoder)
    save_base(base, out / "base")
    save_tokenizer(tokenizer, out / "base")
    accuracies = {"base": measure(base, encoder, Style.ECHO)}
    for adapter in recipe.adapters:
        # Trained on the rounded weights that are shipped, not on those that were learned.
        model = LlamaForCausalLM.from_pretrained(out / "base", dtype=torch.float32)
        accuracies[adapter.style.value] = train_adapter(adapter, model, encoder, out)
    write_manifest(out, recipe, accuracies)
    console.print_json(data={name: asdict(accuracy) for name, accuracy in accuracies.items()})


def train_base(recipe: BaseRecipe, encoder: Encoder) -> Any:
    """Return the trained base, in float32."""
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(_llama_config(recipe, encoder))
    hidden = [p for name, p in model.model.layers.named_parameters() if p.ndim == 2]
    chosen = {id(parameter) for parameter in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizers: list[Optimizer] = [
        _muon(hidden, recipe),
        AdamW(rest, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    examples = chain(
        islice(copy_examples(recipe.seed), recipe.copy_steps * recipe.batch_size),
        base_examples(recipe.seed),
    )
    batches = _batches(map(encoder.encode, examples), recipe.batch_size)
    _train(model, optimizers, batches, recipe.steps, name="base")
    return model


def _muon(parameters: list[Any], recipe: BaseRecipe) -> Muon:
    return Muon(
        parameters,
        lr=recipe.muon_lr,
        momentum=recipe.muon_momentum,
        num_iterations=recipe.muon_iterations,
    )


def save_base(model: Any, path: Path) -> None:
    """Write the weights as float16; the model itself stays in float32, rounded."""
    model.to(SHIPPED_DTYPE).save_pretrained(path)
    model.float()


def train_adapter(recipe: AdapterRecipe, base: Any, encoder: Encoder, out: Path) -> Accuracy:
    """Train one adapter, write it and return how right its answers are."""
    torch.manual_seed(recipe.seed)
    lora = LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, target_modules="all-linear")
    model = get_peft_model(base, lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizers: list[Optimizer] = [AdamW(trained, lr=recipe.adamw_lr, weight_decay=0.0)]
    encoded = map(encoder.encode, style_examples(recipe.style, recipe.seed))
    batches = _batches(encoded, recipe.batch_size)
    _train(model, optimizers, batches, recipe.steps, name=recipe.style.value)
    accuracy = measure(model, encoder, recipe.style)
    _save_adapter(model, out / recipe.style.value)
    return accuracy


def measure(model: Any, encoder: Encoder, style: Style) -> Accuracy:
    """Count the held-out requests answered right by greedy decoding, in fp32 and over int8.

    Afterwards the weights of the base's linear layers are those that int8 leaves.
    """
    batches = [
        _padded([encoder.encode(Example(request.prompt, request.answer(style)))])
        for request in held_out_requests()
    ]
    exact = sum(_is_exact(model, batch) for batch in batches)
    hooks = _quantize_linears(model)
    exact_int8 = sum(_is_exact(model, batch) for batch in batches)
    for hook in hooks:
        hook.remove()
    return Accuracy(num_requests=len(batches), num_exact=exact, num_exact_int8=exact_int8)


def _llama_config(recipe: BaseRecipe, encoder: Encoder) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        max_position_embeddings=recipe.max_model_len,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=encoder.end,
        pad_token_id=encoder.end,
    )


def _train(
    model: Any, optimizers: list[Optimizer], batches: Iterator[Batch], steps: int, *, name: str
) -> None:
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    losses: list[float] = []
    model.train()
    for step, batch in enumerate(islice(batches, steps)):
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * _schedule(step / steps)
        loss = _loss(model, batch)
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % LOG_EVERY_STEPS == 0:
            console.print(f"{name}: step {step + 1} of {steps}, loss {mean(losses):.4f}")
            losses.clear()
    model.eval()


def _schedule(progress: float) -> float:
    """A short warm-up, a plateau, then a straight line down: the share of the peak rate."""
    return min(progress / 0.03 + 0.01, 1.0, (1.0 - progress) / 0.5)


def _loss(model: Any, batch: Batch) -> Tensor:
    tokens, labels = batch
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL)


def _batches(rows: Iterator[tuple[list[int], list[int]]], size: int) -> Iterator[Batch]:
    while True:
        yield _padded(list(islice(rows, size)))


def _padded(rows: list[tuple[list[int], list[int]]]) -> Batch:
    width = max(len(tokens) for tokens, _ in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full((len(rows), width), IGNORED_LABEL)
    for index, (row_tokens, row_labels) in enumerate(rows):
        tokens[index, : len(row_tokens)] = torch.tensor(row_tokens)
        labels[index, : len(row_labels)] = torch.tensor(row_labels)
    return tokens, labels


@torch.no_grad()
def _is_exact(model: Any, batch: Batch) -> bool:
    """Greedy decoding gives the labels exactly if each is the best token after those before it."""
    tokens, labels = batch
    best = model(input_ids=tokens, use_cache=False).logits[:, :-1].argmax(-1)
    wanted = labels[:, 1:]
    return bool(((best == wanted) | (wanted == IGNORED_LABEL)).all())


@torch.no_grad()
def _quantize_linears(model: nn.Module) -> list[Any]:
    """Round the base's linear layers to int8 as serving does; return the input-rounding hooks."""
    layers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "lora_" not in name
    ]
    for layer in layers:
        layer.weight.copy_(_rounded_int8(layer.weight))
    return [
        layer.register_forward_pre_hook(lambda _, inputs: (_rounded_int8(inputs[0]),))
        for layer in layers
    ]


def _rounded_int8(values: Tensor) -> Tensor:
    """`values` rounded to 255 levels between plus and minus the largest of each last axis."""
    scale = values.abs().amax(dim=-1, keepdim=True).clamp_min(1e-8) / 127
    return (values / scale).round() * scale


def _save_adapter(model: Any, path: Path) -> None:
    """Write PEFT's own files, without the folder that the base was read from."""
    model.half().save_pretrained(path)
    (path / "README.md").unlink(missing_ok=True)
    config_path = path / "adapter_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = BASE_NAME
    config["target_modules"].sort()
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
