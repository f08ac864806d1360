"""EAGLE-3 heads on disk: `config.json` and safetensors with the original tensor names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from ...adapters.weights import content_bytes
from .eagle_head import EagleHead, empty_head, head_config
from .head_folder import HeadFolder

WEIGHTS_NAME = "model.safetensors"
ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYERS_NAME = "eagle_aux_hidden_state_layer_ids"
NUM_LAYERS_READ = 3
_EMBEDDING = "embed_tokens.weight"
_TO_DRAFT = "t2d"
"""Which tokens can be drafted; `d2t` says the same."""
_TO_TOKEN = "d2t"


@dataclass(frozen=True, slots=True, eq=False)
class EagleCheckpoint:
    """A head and what it reads of its base."""

    head: EagleHead
    layers: tuple[int, ...]
    """See `LayerFeatures`."""
    embedding: nn.Embedding | None
    """Its own input embedding; None: it reads the base's."""
    head_id: str
    """Hex SHA-256 of its form and of what it reads. Heads with the same one can be served together:
    they differ in their own values alone."""


def layers_read(num_layers: int) -> tuple[int, ...]:
    """The layers that a head reads of a base with so many, if its configuration names none: those
    of the original implementation."""
    return (2, num_layers // 2, num_layers - 3)


def save_head(head: EagleHead, path: Path, *, layers: tuple[int, ...], base_id: str) -> None:
    """Write a head that reads the base's embedding into the folder `path`."""
    config = head.config.to_dict() | {
        "architectures": [ARCHITECTURE],
        "base_id": base_id,
        "draft_vocab_size": len(head.d2t),
        "eagle_config": {LAYERS_NAME: list(layers)},
        "norm_before_residual": head.norms_before_residual,
        "num_hidden_layers": 1,
    }
    tensors = {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
    to_draft = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    to_draft[head.token_ids.cpu()] = True
    _folder(path).write(config, WEIGHTS_NAME, {**tensors, _TO_DRAFT: to_draft})


def load_head(
    path: Path,
    *,
    hidden_size: int,
    vocab_size: int,
    num_layers: int,
    base_id: str,
    dtype: torch.dtype = torch.float32,
) -> EagleCheckpoint:
    """The head in the folder `path`, for a base with these sizes, on the CPU in `dtype`.

    Raises InvalidParameter if it cannot be read or is another base's.
    """
    folder = _folder(path)
    head, layers = _empty_head(
        folder,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_layers=num_layers,
        base_id=base_id,
    )
    draft_vocab_size = len(head.d2t)
    tensors = folder.read_tensors()
    to_token = tensors.pop(_TO_TOKEN, torch.zeros(draft_vocab_size, dtype=torch.int64))
    _check_tokens(folder, to_token, draft_vocab_size, vocab_size)
    tensors.pop(_TO_DRAFT, None)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.named_parameters()}
    if _EMBEDDING in tensors:
        shapes[_EMBEDDING] = (vocab_size, head.config.hidden_size)
    else:
        _check_size(folder, head, hidden_size)
    folder.check_tensors(tensors, shapes)
    head_id = _head_id(head, layers, tensors, to_token)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    embedding = _embedding(tensors.pop(_EMBEDDING, None))
    head.load_state_dict({**tensors, _TO_TOKEN: to_token}, assign=True)
    return EagleCheckpoint(head.requires_grad_(False), layers, embedding, head_id)


class ExpectedHead(NamedTuple):
    """A head that is not loaded."""

    head: EagleHead
    """Its parameters have no storage."""
    has_embedding: bool
    """Its own."""


def expect_head(path: Path, *, hidden_size: int, vocab_size: int, num_layers: int) -> ExpectedHead:
    """What `load_head` would load. Raises InvalidParameter as it does for everything but the
    tensors and the base's identity."""
    folder = _folder(path)
    head, _ = _empty_head(
        folder,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_layers=num_layers,
        base_id=None,
    )
    has_embedding = _EMBEDDING in folder.tensor_names()
    if not has_embedding:
        _check_size(folder, head, hidden_size)
    return ExpectedHead(head, has_embedding)


def _empty_head(
    folder: HeadFolder, *, hidden_size: int, vocab_size: int, num_layers: int, base_id: str | None
) -> tuple[EagleHead, tuple[int, ...]]:
    """The head, without storage, and the layers that it reads."""
    raw = folder.read_config()
    folder.check_base(raw, {"vocab_size": vocab_size}, base_id=base_id)
    if raw.get("num_hidden_layers", 1) != 1:
        folder.refuse("it has more than one layer: only heads of EAGLE-3 are served")
    layers = _layers(folder, raw, num_layers)
    draft_vocab_size = folder.number(
        {"draft_vocab_size": vocab_size} | raw, "draft_vocab_size", vocab_size
    )
    head = empty_head(
        _head_config(folder, raw),
        feature_size=NUM_LAYERS_READ * hidden_size,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
    )
    _check_rotation(folder, head)
    return head, layers


def _head_id(
    head: EagleHead, layers: tuple[int, ...], tensors: Mapping[str, Tensor], to_token: Tensor
) -> str:
    config = head.config
    form = [
        *(config.hidden_size, config.intermediate_size, config.num_attention_heads),
        *(config.num_key_value_heads, config.head_dim, config.vocab_size, config.rms_norm_eps),
        *(config.rope_parameters, head.norms_before_residual, _EMBEDDING in tensors, layers),
    ]
    hasher = hashlib.sha256(json.dumps(form, sort_keys=True).encode())
    for read in (tensors["fc.weight"].float(), to_token):
        hasher.update(content_bytes(read.contiguous().numpy()))
    return hasher.hexdigest()


def _head_config(folder: HeadFolder, raw: Mapping[str, Any]) -> LlamaConfig:
    try:
        config = head_config(raw)
    except Exception as exc:  # whatever transformers says of such a configuration
        folder.refuse(f"config.json describes no layer of Llama: {exc}")
    if config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        folder.refuse("a head with biases, or without SiLU, is not served")
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        folder.refuse(f"its {num_heads} heads do not divide among {num_kv_heads} KV heads")
    return config


def _check_rotation(folder: HeadFolder, head: EagleHead) -> None:
    attention = head.midlayer.self_attn
    num_rotated = 2 * len(attention.rotary.inv_freq)
    if num_rotated != attention.head_dim:
        folder.refuse(f"it rotates {num_rotated} of {attention.head_dim} dimensions of a head")


def _check_size(folder: HeadFolder, head: EagleHead, hidden_size: int) -> None:
    """Of a head that reads the base's embedding."""
    if head.config.hidden_size != hidden_size:
        folder.refuse(f"{_EMBEDDING} is missing, and the base's has another size")


def _layers(folder: HeadFolder, raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    own = raw.get("eagle_config")
    named = (own if isinstance(own, dict) else raw).get(LAYERS_NAME)
    layers = layers_read(num_layers) if named is None else named
    is_list = isinstance(layers, (list, tuple)) and len(layers) == NUM_LAYERS_READ
    if not is_list or not all(type(layer) is int and 1 <= layer <= num_layers for layer in layers):
        folder.refuse(f"it reads the layers {layers}, not {NUM_LAYERS_READ} of 1 to {num_layers}")
    return tuple(layers)


def _check_tokens(
    folder: HeadFolder, to_token: Tensor, draft_vocab_size: int, vocab_size: int
) -> None:
    """Every draft token is another token of the base, and all of them are in order."""
    if to_token.dtype != torch.int64 or tuple(to_token.shape) != (draft_vocab_size,):
        folder.refuse(f"{_TO_TOKEN} is {to_token.dtype} {list(to_token.shape)}")
    token_ids = to_token + torch.arange(draft_vocab_size)
    is_token = (token_ids >= 0) & (token_ids < vocab_size)
    if not is_token.all() or not (token_ids.diff() > 0).all():
        folder.refuse(f"{_TO_TOKEN} does not name {draft_vocab_size} tokens of the base")


def _embedding(weight: Tensor | None) -> nn.Embedding | None:
    if weight is None:
        return None
    embedding: nn.Embedding = nn.Embedding.from_pretrained(weight)
    return embedding


def _folder(path: Path) -> HeadFolder:
    return HeadFolder("EAGLE head", path)
