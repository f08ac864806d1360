"""The largest step there can be, run once to see what its activations take."""

from __future__ import annotations

import torch

from .base_model import BaseModel
from .config import EngineConfig
from .forward import PagedForward, run_model
from .inputs import Span, make_inputs
from .kv_cache import KvCache


def profile_step(config: EngineConfig, base: BaseModel) -> None:
    """A prefill of the whole token budget, and logits of as many rows as there are sequences."""
    num_tokens = min(config.max_num_batched_tokens, base.max_model_len)
    num_blocks = -(-num_tokens // config.kv_block_size)
    cache = KvCache(
        base.kv_shapes,
        num_blocks=1 + num_blocks,
        block_size=config.kv_block_size,
        dtype=base.dtype,
        device=base.device,
    )
    span = Span([0] * num_tokens, start=0, block_ids=range(1, 1 + num_blocks))
    inputs = make_inputs([span], block_size=config.kv_block_size, device=base.device)
    rows = torch.arange(min(config.max_num_seqs, num_tokens), device=base.device)
    forward = PagedForward(cache, inputs.attention)
    run_model(base.model, forward, inputs.input_ids, inputs.positions, rows)
