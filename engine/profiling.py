"""The largest step there can be, run once to see what its activations take."""

from __future__ import annotations

import torch

from .base_model import BaseModel
from .config import EngineConfig
from .forward import PagedForward, run_model
from .inputs import Span, make_inputs
from .kv_cache import KvCache

PROFILE_CONTEXT = 8192
"""Longer contexts take proportionally more: the reserve is for them."""


def profile_step(config: EngineConfig, base: BaseModel) -> None:
    """The last chunk of a long prompt, with logits of as many rows as there are sequences."""
    context = min(base.max_model_len, PROFILE_CONTEXT)
    num_tokens = min(config.max_num_batched_tokens, context)
    table = [1] * -(-context // config.kv_block_size)  # one block, read again and again
    cache = KvCache(
        base.kv_shapes,
        num_blocks=2,
        block_size=config.kv_block_size,
        dtype=base.dtype,
        device=base.device,
    )
    span = Span([0] * num_tokens, start=context - num_tokens, block_ids=table)
    inputs = make_inputs([span], block_size=config.kv_block_size, device=base.device)
    rows = torch.arange(min(config.max_num_seqs, num_tokens), device=base.device)
    forward = PagedForward(cache, inputs.attention)
    run_model(base.model, forward, inputs.input_ids, inputs.positions, rows)
