"""Small random models with a loaded model's class and layer pattern, and with low thresholds.

The loaded model cannot test windows, chunks and original contexts of thousands of positions at
every start. A copy keeps what determines a layer's attention (class, layer types, rope, heads per
key/value head) and shrinks the rest: width, depth, experts, vocabulary.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..checkpoint.known_classes import give_known_classes

_THRESHOLD = re.compile(
    r"window(_size|_len)?$|att(entio)?n_chunk_(size|length)$|^original_max_position_embeddings$"
    r"|floor|^index_topk$|^local_attention$|extent$|max_distance$"
)
"""Settings that give the number of positions from which a model computes differently."""
_FIRST_THRESHOLD = 7
_THRESHOLD_STEP = 9
"""The copy's thresholds are 7, 16, 25, ... positions, in the order of the model's own."""

_SMALL = {
    re.compile(r"^vocab_size"): 128,
    re.compile(r"(intermediate|ffn_hidden)_size$|^ffn_dim$|^n_inner$"): 64,
    re.compile(r"^(num|num_local|n_routed|moe_num)_experts$"): 16,
}
"""Settings that only determine a model's size, with values that suffice for a copy."""
_MAX_PARAMETERS = 250_000_000


def find_thresholds(config: Any, *, max_model_len: int) -> list[int]:
    """Positions below `max_model_len` at which this configuration changes the computation."""
    values = {part[name] for part, name in _threshold_places(config)}
    return sorted(value for value in values if value < max_model_len)


def small_copies(config: Any, *, max_model_len: int) -> Iterator[PreTrainedModel]:
    """Models for this configuration in fp32 on the CPU, the smallest first.

    Not every family can be shrunk in every respect: a copy may fail when it is run, and there may
    be none.
    """
    for cut_layers, cut_widths in ((True, True), (True, False), (False, True), (False, False)):
        small = copy.deepcopy(config)
        # Families validate their settings on each assignment and may raise any exception.
        with suppress(Exception):
            _lower_thresholds(small, max_model_len)
            _cut_sizes(small)
            if cut_layers:
                _cut_layers(small)
            if cut_widths:
                _cut_widths(small)
            if _count_parameters(small) <= _MAX_PARAMETERS:
                yield _draw(small)


def _threshold_places(config: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Each threshold's dictionary and name: that of the configuration or of a part, as its rope."""
    parts = [vars(config)]
    while parts:
        part = parts.pop()
        for name, value in part.items():
            if isinstance(value, dict):
                parts.append(value)
            elif _is_size(value) and _THRESHOLD.search(name):
                yield part, name


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _lower_thresholds(config: Any, max_model_len: int) -> None:
    own = find_thresholds(config, max_model_len=max_model_len)
    lowered = {value: _FIRST_THRESHOLD + _THRESHOLD_STEP * rank for rank, value in enumerate(own)}
    for part, name in list(_threshold_places(config)):
        part[name] = min(part[name], lowered.get(part[name], part[name]))


def _cut_sizes(config: Any) -> None:
    settings = vars(config)
    for pattern, size in _SMALL.items():
        for name, value in settings.items():
            if pattern.search(name) and _is_size(value):
                settings[name] = min(value, size)
    for name, value in settings.items():
        if name.endswith("token_id") and _is_size(value) and value >= config.vocab_size:
            settings[name] = None


def _cut_layers(config: Any) -> None:
    """Keep the first layers, as many as are needed to include each kind of layer."""
    num_layers = config.num_hidden_layers
    per_layer = {
        name: values
        for name, values in vars(config).items()
        if isinstance(values, list) and len(values) == num_layers
    }
    kept = max([2, *(_last_first_seen(values) for values in per_layer.values())])
    config.num_hidden_layers = min(kept, num_layers)
    for name, values in per_layer.items():
        setattr(config, name, values[:kept])


def _last_first_seen(values: list[Any]) -> int:
    """The length of the shortest prefix that has every value of the list."""
    return 1 + max(values.index(value) for value in values)


def _cut_widths(config: Any) -> None:
    """Fewer heads of the same size, with the same number per key/value head."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = min(kv_heads, 2 if heads == kv_heads else 1)
    config.num_attention_heads = heads // kv_heads * kept
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = kept
    config.hidden_size = config.num_attention_heads * head_dim


def _count_parameters(config: Any) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def _draw(config: Any) -> PreTrainedModel:
    """A model whose layers change their input; the families' own initial weights hardly do."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would reseed CUDA's as well
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
        for module in model.modules():
            _redraw(module)
    give_known_classes(model)
    model.requires_grad_(False)
    return model.eval()


def _redraw(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        if parameter.ndim >= 2:
            scale = 1.0 if isinstance(module, nn.Embedding) else 1.5 * parameter.shape[-1] ** -0.5
            nn.init.normal_(parameter, std=scale)
