"""What a proposer needs of a head that continues hidden states of the base with a layer."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from ...kernels.attention import AttentionBatch
from ...kernels.kv_pages import KvPages
from ..kv.groups import LayerKvShape

Pages = tuple[KvPages, KvPages]
"""Of keys and of values."""


class Rotation(NamedTuple):
    """`[num_pairs, rotary_dim]` each."""

    cos: Tensor
    sin: Tensor


class DraftHead(Protocol):
    """A served head. A pair is a token with the features of the token before it."""

    @property
    def token_ids(self) -> Tensor:
        """int64 `[draft_vocab_size]`: the tokens that it drafts."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kv_shape(self) -> LayerKvShape: ...

    @property
    def feature_sizes(self) -> tuple[int, int]:
        """Of what a step collects for a token, and of the features that are made of it."""
        ...

    def rotation(self, positions: Tensor) -> Rotation:
        """For `positions [num_pairs]`, int64."""
        ...

    def run(
        self,
        embedded: Tensor,
        features: Tensor,
        rotation: Rotation,
        kept: Tensor,
        pages: Pages,
        batch: AttentionBatch,
        *,
        is_captured: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Compute pairs of `embedded` tokens and `features [num_pairs, hidden_size]`, and store
        their keys and values. `is_captured`: the pass becomes a graph.

        Returns the hidden states of the pairs `kept`, int64, and fp32 logits of what follows them:
        `[len(kept), draft_vocab_size]`.
        """
        ...

    def whole_logits(self, draft_logits: Tensor) -> Tensor:
        """fp32 `[num_pairs, vocab_size]`."""
        ...
