"""A Llama of two layers that finds and copies by induction, with weights that are set by hand.

The head of the first layer attends to the token before; its value is that token's code. The head of
the second layer looks for the current token among the tokens before, and adds the code of the token
that followed. So a token that came before is followed as it was then (Olsson et al. 2022). Nothing
else predicts anything, which makes what is missing in a KV cache visible: the answer is wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from support.models import save_byte_tokenizer

VOCAB_SIZE = 1024
CODE = 96
"""Elements of a token's code."""
HEAD_DIM = 256
ROPE_THETA = 1e8
HIDDEN = 3 * CODE + 32
TOKEN, BEFORE, OUT = slice(0, CODE), slice(CODE, 2 * CODE), slice(2 * CODE, 3 * CODE)
"""The parts of the residual stream: codes of the token, of the one before, and of the answer."""
CONSTANT = 3 * CODE
NUM_FAST = 32
"""Frequencies that tell a token from its neighbors."""
NUM_SLOW = CODE // 2
"""Frequencies that hardly turn over 1,000 positions: they compare codes wherever they are."""
SHARPNESS = 40.0
"""Of both heads: the difference of scores between the right key and all others, about."""


def save_induction_model(path: Path, *, max_position_embeddings: int = 2048) -> Path:
    save_byte_tokenizer(path)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        _set_weights(model)
    model.save_pretrained(path)
    return path


def _set_weights(model: LlamaForCausalLM) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(VOCAB_SIZE, CODE, generator=generator)
    codes /= codes.norm(dim=1, keepdim=True)
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0 if "norm" in name else 0.0)
    decoder = model.model
    decoder.embed_tokens.weight[:, TOKEN] = codes
    decoder.embed_tokens.weight[:, CONSTANT] = 1.0
    model.lm_head.weight[:, OUT] = codes
    _attend_to_the_token_before(decoder.layers[0].self_attn)
    _attend_to_what_followed(decoder.layers[1].self_attn)


def _attend_to_the_token_before(attention: Any) -> None:
    """Constant queries turned back by one position, and constant keys: the score is largest one
    position before."""
    scale = _norm_scale(2)
    angles = _frequencies()[:NUM_FAST]
    amplitude = (SHARPNESS * HEAD_DIM**0.5 / 1.9) ** 0.5 / scale
    first, second = slice(0, NUM_FAST), slice(HEAD_DIM // 2, HEAD_DIM // 2 + NUM_FAST)
    attention.k_proj.weight[first, CONSTANT] = amplitude
    attention.q_proj.weight[first, CONSTANT] = amplitude * angles.cos()
    attention.q_proj.weight[second, CONSTANT] = -amplitude * angles.sin()
    _copy_code(attention, BEFORE, scale)


def _attend_to_what_followed(attention: Any) -> None:
    """The current token's code as the query, that of the token before as the key."""
    scale = _norm_scale(3)
    amplitude = (2 * SHARPNESS * HEAD_DIM**0.5) ** 0.5 / scale
    start = HEAD_DIM // 2 - NUM_SLOW
    rows = [*range(start, HEAD_DIM // 2), *range(HEAD_DIM // 2 + start, HEAD_DIM)]
    attention.q_proj.weight[rows, TOKEN] = amplitude * torch.eye(CODE)
    attention.k_proj.weight[rows, BEFORE] = amplitude * torch.eye(CODE)
    _copy_code(attention, OUT, scale)


def _copy_code(attention: Any, target: slice, scale: float) -> None:
    """The attended tokens' codes, of length 1, go to this part of the residual stream."""
    attention.v_proj.weight[:CODE, TOKEN] = torch.eye(CODE)
    attention.o_proj.weight[target, :CODE] = torch.eye(CODE) / scale


def _norm_scale(num_parts: int) -> float:
    """What RMS norm multiplies a residual stream of so many parts of length 1 by."""
    return float((HIDDEN / num_parts) ** 0.5)


def _frequencies() -> Tensor:
    """Radians per position of each pair of a head's elements."""
    exponents = torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
    return torch.tensor(ROPE_THETA) ** -exponents
