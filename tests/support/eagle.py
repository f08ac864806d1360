"""EAGLE-3 heads for tests, and an independent reference of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from loraplex.engine.checkpoint.base_identity import compute_base_id
from loraplex.engine.draft import Draft
from loraplex.engine.speculation.attached_head import attach_head
from loraplex.engine.speculation.eagle import EagleProposer
from loraplex.engine.speculation.eagle_checkpoint import EagleCheckpoint, load_head, save_head
from loraplex.engine.speculation.eagle_head import EagleHead
from loraplex.engine.speculation.proposer import DraftRequest
from support.models import make_adapter

Made = list[tuple[str, list[int], Draft]]
"""Drafts, with their requests' ids and tokens."""


def make_head(
    *,
    hidden_size: int = 64,
    vocab_size: int = 260,
    draft_vocab_size: int | None = None,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    seed: int = 0,
    norm_before_residual: bool = False,
) -> EagleHead:
    """A random head; with a reduced vocabulary it drafts every second token."""
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        num_hidden_layers=1,
        vocab_size=vocab_size,
        max_position_embeddings=512,
    )
    head = EagleHead(
        config,
        feature_size=3 * hidden_size,
        draft_vocab_size=draft_vocab_size or vocab_size,
        norm_before_residual=norm_before_residual,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            scale = 0.3 if parameter.ndim > 1 else 0.2
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise if parameter.ndim > 1 else 1 + noise)
        if draft_vocab_size is not None:
            head.d2t.copy_(torch.arange(draft_vocab_size))
    return head.requires_grad_(False)


def save_random_head(base: Path, path: Path, *, layers: Sequence[int] = (1, 1, 2)) -> EagleHead:
    """A random head of such a base's sizes, which is seldom right."""
    config = AutoModelForCausalLM.from_pretrained(base).config
    head = make_head(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size // 2,
    )
    save_head(head, path, layers=tuple(layers), base_id=compute_base_id(base))
    return head


def load_head_for(base: Path, path: Path) -> EagleCheckpoint:
    config = AutoConfig.from_pretrained(base)
    return load_head(
        path,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        base_id=compute_base_id(base),
    )


def save_changed_head(
    base: Path, source: Path, path: Path, *, seed: int, reads_same: bool = True
) -> None:
    """The head in `source` with other weights, as training under an adapter changes them.
    `reads_same`: whether the projection of the features stays, so that both can be served."""
    loaded = load_head_for(base, source)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in loaded.head.named_parameters():
        if name != "fc.weight" or not reads_same:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    save_head(loaded.head, path, layers=loaded.layers, base_id=compute_base_id(base))


def make_adapter_with_head(base: Path, head: Path, path: Path, *, seed: int, **lora: Any) -> Path:
    """A folder with an adapter and a head of its own, which reads what the base's `head` does."""
    plain, changed = path.with_name(f"{path.name}-plain"), path.with_name(f"{path.name}-head")
    save_changed_head(base, head, changed, seed=seed)
    path.mkdir()
    attach_head(load_head_for(base, changed), make_adapter(base, plain, seed=seed, **lora), path)
    return path


def save_repeating_head(base: Path, path: Path) -> None:
    """A head that says what the base said of the token before: it is right where the base's output
    repeats."""
    model = AutoModelForCausalLM.from_pretrained(base)
    size, num_layers = model.config.hidden_size, model.config.num_hidden_layers
    head = make_head(hidden_size=size, vocab_size=model.config.vocab_size)
    with torch.no_grad():
        head.fc.weight.zero_()[:, -size:] = torch.eye(size)
        head.midlayer.self_attn.o_proj.weight.zero_()
        head.midlayer.mlp.down_proj.weight.zero_()
        head.norm.weight.copy_(model.model.norm.weight)
        head.norm.eps = model.config.rms_norm_eps
        head.lm_head.weight.copy_(model.get_output_embeddings().weight)
    head.config.rms_norm_eps = model.config.rms_norm_eps
    save_head(head, path, layers=(1, 1, num_layers), base_id=compute_base_id(base))


@contextmanager
def spied() -> Iterator[Made]:
    made: Made = []
    propose = EagleProposer.propose

    def spying(proposer: EagleProposer, wanted: Sequence[DraftRequest]) -> list[Draft]:
        drafts = propose(proposer, wanted)
        made.extend(
            (entry.request.request_id, list(entry.request.token_ids), draft)
            for entry, draft in zip(wanted, drafts, strict=True)
        )
        return drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagleProposer, "propose", spying)
        yield made


def dense_layers(model: Any, layers: Sequence[int], token_ids: Sequence[int]) -> Tensor:
    """`[num_tokens, 3 * hidden_size]`: the states that the head reads, by transformers alone."""
    kept: dict[int, Tensor] = {}
    hooks = [
        model.model.layers[layer - 1].register_forward_hook(
            lambda _module, _args, output, layer=layer: kept.__setitem__(layer, output[0])
        )
        for layer in set(layers)
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return torch.cat([kept[layer] for layer in layers], dim=-1)


class DenseEagle:
    """What a head computes, in float64 and written down from the paper: pair after pair, without a
    batch, pages or modules."""

    def __init__(
        self, head: EagleHead, embedding: Tensor, *, norm_before_residual: bool = False
    ) -> None:
        """`embedding [vocab_size, hidden_size]`."""
        self._norms_before_residual = norm_before_residual
        self._weights = {name: tensor.double() for name, tensor in head.state_dict().items()}
        self._config = head.config
        self._embedding = embedding.double()
        self._token_ids = head.token_ids.tolist()
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def project(self, layers: Tensor) -> Tensor:
        projected: Tensor = self._weights["fc.weight"] @ layers.double()
        return projected

    def state(self, token: int, features: Tensor) -> Tensor:
        """Of the next pair, `[hidden_size]`."""
        config, position = self._config, len(self._keys)
        pair = torch.cat(
            [
                self._norm(self._embedding[token], "midlayer.input_layernorm"),
                self._norm(features, "midlayer.hidden_norm"),
            ]
        )
        q, k, v = (
            (self._weights[f"midlayer.self_attn.{name}_proj.weight"] @ pair).view(
                -1, config.head_dim
            )
            for name in "qkv"
        )
        self._keys.append(self._rotated(k, position))
        self._values.append(v)
        q = self._rotated(q, position)
        per_key = config.num_attention_heads // config.num_key_value_heads
        heads = []
        for index, query in enumerate(q):
            scores = [key[index // per_key] @ query for key in self._keys]
            shares = (torch.stack(scores) / config.head_dim**0.5).softmax(0)
            heads.append(
                sum(
                    share * value[index // per_key]
                    for share, value in zip(shares, self._values, strict=True)
                )
            )
        if self._norms_before_residual:
            features = self._norm(features, "midlayer.hidden_norm")
        x = features + self._weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
        normed = self._norm(x, "midlayer.post_attention_layernorm")
        gate, up, down = (
            self._weights[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        gated = gate @ normed
        output: Tensor = x + down @ (gated * gated.sigmoid() * (up @ normed))
        return output

    def logits(self, state: Tensor) -> Tensor:
        """`[vocab_size]`, -inf for what the head cannot draft."""
        drafted = self._weights["lm_head.weight"] @ self._norm(state, "norm")
        logits = torch.full((self._config.vocab_size,), -torch.inf, dtype=torch.float64)
        logits[self._token_ids] = drafted
        return logits

    def back_to(self, num_pairs: int) -> None:
        """Forget the later pairs."""
        del self._keys[num_pairs:], self._values[num_pairs:]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean_square = (x * x).mean() + self._config.rms_norm_eps
        normed: Tensor = x / mean_square.sqrt() * self._weights[f"{name}.weight"]
        return normed

    def _rotated(self, heads: Tensor, position: int) -> Tensor:
        half = heads.shape[-1] // 2
        theta = self._config.rope_parameters["rope_theta"]
        turns = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        first, second = heads[:, :half], heads[:, half:]
        return torch.cat(
            [
                first * turns.cos() - second * turns.sin(),
                second * turns.cos() + first * turns.sin(),
            ],
            dim=-1,
        )
