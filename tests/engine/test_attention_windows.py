"""Attention windows, read from the masks that models build."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.model.admission import probe_kv_shapes
from loraplex.engine.model.attention_windows import LayerProbe, MaskFunction, read_window
from loraplex.engine.model.forward import attention
from loraplex.kernels.attention_window import AttentionWindow
from support.families import SERVED, save_family


def in_chunks(size: int) -> MaskFunction:
    return lambda _batch, _head, q, kv: (kv <= q) & (q // size == kv // size)


@pytest.mark.parametrize("window", [1, 2, 7, 64, 99])
def test_a_sliding_windows_size_is_read_from_its_mask(window: int) -> None:
    assert read_window(sliding_window_causal_mask_function(window), 100) == AttentionWindow(window)


@pytest.mark.parametrize(
    "mask", [causal_mask_function, *map(sliding_window_causal_mask_function, (100, 4096))]
)
def test_a_mask_that_hides_nothing_of_the_longest_sequence_has_no_window(
    mask: MaskFunction,
) -> None:
    assert read_window(mask, 100) is None


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 32, 50, 64, 99])
def test_chunks_are_never_taken_for_sliding_windows(size: int) -> None:
    """In chunks of one, each token sees itself alone, as in a window of one."""
    assert read_window(in_chunks(size), 100) == AttentionWindow(size, is_chunked=size > 1)


@pytest.mark.parametrize("size", [100, 8192])
def test_a_chunk_that_no_sequence_leaves_is_no_window(size: int) -> None:
    assert read_window(in_chunks(size), 100) is None


@pytest.mark.parametrize("offset", [1, 3])
def test_chunks_that_begin_elsewhere_are_refused(offset: int) -> None:
    def mask(_batch: Tensor, _head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & ((q + offset) // 8 == (kv + offset) // 8)

    with pytest.raises(UnsupportedModel, match="neither causal nor a window"):
        read_window(mask, 100)


@pytest.mark.parametrize(
    "mask", [bidirectional_mask_function, sliding_window_bidirectional_mask_function(8)]
)
def test_a_mask_that_shows_later_tokens_is_refused(mask: MaskFunction) -> None:
    with pytest.raises(UnsupportedModel, match="neither causal nor a window"):
        read_window(mask, 100)


def test_windows_that_only_masks_hold_are_found_by_layer(tmp_path: Path) -> None:
    model_type, settings = SERVED["qwen2_moe-window"]
    path = save_family(tmp_path, model_type, {**settings, "sliding_window": 20})
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    is_windowed = [kind == "sliding_attention" for kind in model.config.layer_types]
    assert len({*is_windowed}) == 2

    shapes = probe_kv_shapes(model, model.config, max_model_len=256)

    assert [shape.window for shape in shapes] == [
        AttentionWindow(20) if is_it else None for is_it in is_windowed
    ]


def test_a_mask_that_the_model_has_changed_is_refused() -> None:
    probe = LayerProbe(max_model_len=256)
    mask = probe.stand_in(sliding_window_causal_mask_function(20))
    assert probe.window_of(mask) == AttentionWindow(20)
    with pytest.raises(UnsupportedModel, match="its own mask"):
        probe.window_of(mask & True)


def test_a_mask_that_no_layer_gets_is_not_read(tmp_path: Path) -> None:
    model_type, settings = SERVED["qwen2_moe-window"]
    path = save_family(tmp_path, model_type, {**settings, "use_sliding_window": False})
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    assert model.config.sliding_window == 0, "its class builds a mask that shows nothing"
    shapes = probe_kv_shapes(model, model.config, max_model_len=256)
    assert {shape.window for shape in shapes} == {None}


def test_a_served_layer_with_a_mask_or_an_option_that_would_be_ignored_is_refused() -> None:
    q = torch.zeros(1, 1, 1, 4)
    with pytest.raises(UnsupportedModel, match="its own mask"):
        attention(nn.Identity(), q, q, q, torch.ones(1, 1, 1, 1, dtype=torch.bool))
    with pytest.raises(UnsupportedModel, match="takes position_bias"):
        attention(nn.Identity(), q, q, q, None, is_causal=True, position_bias=q)
