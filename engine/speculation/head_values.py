"""The parameters of an EAGLE head as one vector, as an adapter brings them along.

What a head reads is no part of it: all heads that are served together have the features and draft
tokens of the base's head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .eagle_head import EagleHead, empty_head

_FEATURES = "fc."


def num_values(head: EagleHead) -> int:
    return sum(parameter.numel() for _, parameter in _own_parameters(head))


def values_of(head: EagleHead) -> Tensor:
    """`[num_values]` in the head's dtype: its parameters without the projection of the features,
    one after another."""
    return torch.cat([parameter.detach().flatten() for _, parameter in _own_parameters(head)])


def outline(head: EagleHead) -> EagleHead:
    """A head of the same form whose parameters have no storage."""
    return empty_head(
        head.config,
        feature_size=head.fc.in_features,
        draft_vocab_size=len(head.d2t),
        norm_before_residual=head.norms_before_residual,
    )


def with_values(head: EagleHead, values: Tensor) -> EagleHead:
    """A head of the same form whose parameters are views of `values [num_values]`. It has no
    features and no draft tokens of its own."""
    parts, start = {}, 0
    for name, parameter in _own_parameters(head):
        stop = start + parameter.numel()
        parts[name] = values[start:stop].view(parameter.shape)
        start = stop
    filled = outline(head)
    filled.load_state_dict(parts, strict=False, assign=True)
    return filled.requires_grad_(False)


def _own_parameters(head: EagleHead) -> Iterator[tuple[str, Tensor]]:
    return ((name, each) for name, each in head.named_parameters() if name[:3] != _FEATURES)
