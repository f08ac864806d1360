"""Whether sequences may be longer than the served context: with bounded memory, and at positions
that mean the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kv.cache import KvCache, KvFormat
from ..kv.groups import LayerKvShape, simple_groups
from ..kv.layout import KvGroup
from ..kv.sequence_blocks import block_table
from .admission import probe_kv_shapes, self_test_tokens
from .experts import replace_experts
from .forward import ATTENTION_NAME, PagedForward, run_model
from .inputs import SequenceChunk, make_inputs
from .latent_attention import replace_latents
from .small_copy import small_copies

_LENGTH = 24
"""Tokens that the copy computes: beyond its first windows."""
_SHIFT = 1_000
"""Positions; beyond every lowered threshold, and near enough that fp32 angles stay exact to
1e-4."""
_TOLERANCE = 0.01
"""Of the largest logit. Rounding explains a hundredth of it; an absolute position changes all."""
_SPARE_BLOCKS = 3
"""Blocks of a window's borders, and that which is written."""


def endless_obstacle(
    config: Any,
    groups: Sequence[KvGroup],
    shapes: Sequence[LayerKvShape],
    *,
    max_model_len: int,
    block_size: int,
) -> str | None:
    """Why no sequence of this base may exceed `max_model_len`; None if it may.

    `config`: of transformers. `groups`, `shapes`: of all layers. The answer about positions is
    measured on a small copy of the model, in fp32 on the CPU.
    """
    for group in groups:
        if group.window is None:
            return "some layers attend to all tokens, so memory would grow without a bound"
        if group.window.is_chunked:
            return "not supported with attention in chunks"
        num_blocks = group.num_sink_blocks(block_size) + _SPARE_BLOCKS
        if group.window.size + num_blocks * block_size > max_model_len:
            return "the attention window is too close to --max-model-len"
    has_sinks = any(group.sinks for group in groups)
    if has_sinks and any(shape.has_slopes for shape in shapes):
        return f"{_SINKS} (ALiBi)"
    return _position_obstacle(config, max_model_len=max_model_len, has_sinks=has_sinks)


_SINKS = (
    "the distance to the attention sinks would exceed what the model was trained for; "
    "--attention-sinks 0 serves it"
)


def _position_obstacle(config: Any, *, max_model_len: int, has_sinks: bool) -> str | None:
    for small in small_copies(config, max_model_len=max_model_len):
        try:
            copy = _ServedCopy(small)
            plain = copy.logits(copy.places)
            moved = copy.logits(copy.places + _SHIFT)
            parted = copy.logits(copy.places + _SHIFT * (copy.places >= _LENGTH // 2))
        except IndexError:  # of a table of positions
            return _ABSOLUTE
        except Exception:  # whatever the class meets in settings that do not go together
            continue
        if not _agree(plain, moved):
            return _ABSOLUTE
        if has_sinks and not _agree(plain, parted):
            return _SINKS
        return None
    return f"what {config.model_type} does beyond its context could not be tested"


_ABSOLUTE = "its layers know absolute positions, or their frequencies depend on the length"


class _ServedCopy:
    """A small copy of the model, with Loraplex's attention and a KV cache of one sequence."""

    def __init__(self, small: PreTrainedModel) -> None:
        replace_latents(small)
        shapes = probe_kv_shapes(small, small.config, max_model_len=_LENGTH)
        small.set_attn_implementation("eager")
        replace_experts(small)
        small.set_attn_implementation(ATTENTION_NAME)
        self._model = small
        self._cache = KvCache(
            simple_groups(shapes, 2),
            shapes,
            block_size=_LENGTH,
            kv_format=KvFormat(torch.float32),
            device=torch.device("cpu"),
        )
        (tokens,) = self_test_tokens(small.config.vocab_size, [_LENGTH])
        tables = [block_table([1])] * len(self._cache.groups)
        self._inputs = make_inputs(
            [SequenceChunk(tokens, 0, tables)],
            groups=self._cache.groups,
            block_size=_LENGTH,
            device=torch.device("cpu"),
        )
        self.places = self._inputs.positions

    def logits(self, positions: Tensor) -> Tensor:
        """Those of all tokens, at other positions than their places."""
        inputs = self._inputs
        context = PagedForward.of(self._cache, inputs)
        rows = torch.arange(_LENGTH)
        return run_model(self._model, context, inputs.input_ids, positions, rows)


def _agree(logits: Tensor, others: Tensor) -> bool:
    error = (logits - others).abs().max() / logits.abs().max()
    return bool(error <= _TOLERANCE)
