"""The self-test beyond every window, chunk and original context of a configuration."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import UnsupportedModel
from ..kv.groups import LayerKvShape
from .admission import SELF_TEST_LENGTHS, check_parity, dense_reference, probe_kv_shapes
from .experts import replace_experts
from .forward import ATTENTION_NAME
from .latent_attention import replace_latents
from .rope import rotary_contexts
from .rotary_tables import table_rotary
from .small_copy import find_thresholds, small_copies

_BEYOND = 14
"""The number of positions of a sequence beyond its last threshold: more than a chunk's
remainder."""
_MAX_LENGTH = 1024
"""A window that no known setting names is not lowered; up to here a copy passes it all the same."""


def check_thresholds(config: Any, shapes: list[LayerKvShape], *, max_model_len: int) -> None:
    """Compare the paged with the dense forward pass at positions that the loaded model's test
    misses.

    shapes: the cached entries and windows of the loaded model's layers. Raises UnsupportedModel if
    a copy of the model differs, or if none can be tested.
    """
    thresholds = find_thresholds(config, max_model_len=max_model_len)
    thresholds += _window_sizes(shapes)
    if not thresholds or max(thresholds) + _BEYOND <= max(SELF_TEST_LENGTHS):
        return
    for small in small_copies(config, max_model_len=max_model_len):
        if _runs(small):
            _check_copy(small, shapes, max_model_len=max_model_len)
            return
    raise UnsupportedModel(
        f"what {config.model_type} does from position {min(thresholds)} on could not be tested: "
        f"no small copy of it can be made; with --max-model-len {min(thresholds)} it is not needed"
    )


def _runs(small: PreTrainedModel) -> bool:
    """Whether this copy is a valid model, according to its class and settings."""
    try:
        small(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
    except Exception:  # whatever the class meets in settings that do not go together
        return False
    return True


def _check_copy(small: PreTrainedModel, shapes: list[LayerKvShape], *, max_model_len: int) -> None:
    """shapes: those of the loaded model, whose first layers the copy has."""
    config = small.config
    replace_latents(small)
    own_shapes = probe_kv_shapes(small, config, max_model_len=max_model_len)
    if _window_kinds(own_shapes) != _window_kinds(shapes[: len(own_shapes)]):
        raise UnsupportedModel(f"{config.model_type} has other windows when it is small")
    longest = (
        max([*_window_sizes(own_shapes), *find_thresholds(config, max_model_len=max_model_len)])
        + _BEYOND
    )
    if longest > _MAX_LENGTH:
        raise UnsupportedModel(f"no known setting of {config.model_type} names its window")
    small.set_attn_implementation("eager")
    lengths = (longest, *SELF_TEST_LENGTHS)
    cases = dense_reference(small, config.vocab_size, lengths=lengths)
    replace_experts(small)
    contexts = rotary_contexts(config, max_model_len=max(lengths))
    table_rotary(small, contexts, dtype=small.dtype, device=small.device)
    small.set_attn_implementation(ATTENTION_NAME)
    check_parity(small, own_shapes, cases)


def _window_sizes(shapes: list[LayerKvShape]) -> list[int]:
    return [shape.window.size for shape in shapes if shape.window]


def _window_kinds(shapes: list[LayerKvShape]) -> list[bool | None]:
    """Whether each layer's window is a chunk; None: it has none."""
    return [None if shape.window is None else shape.window.is_chunked for shape in shapes]
