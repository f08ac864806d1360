"""Passes of an EAGLE or multi-token head as CUDA graphs, over the head's own cache.

A pass computes pairs of chains, or a level of trees. It is captured once for each head and number
of rows in a ladder of sizes, and replayed over inputs at fixed addresses, as a decode step is: each
pair is a row that attends separately. The graphs of all heads share their inputs and outputs.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ...kernels.lora_batch import BASE_ROW
from ..config import MAX_DRAFT_TOKENS, EngineConfig
from ..execution.decode_graphs import Capture, max_rows, row_sizes
from ..execution.decode_inputs import DecodeInputs, DecodeLayout
from ..execution.graph_bytes import GRAPH_LAYER_BYTES
from ..kv.cache import KvCache
from ..kv.groups import one_group
from ..kv.layout import KvGroup
from ..model.inputs import SequenceChunk, logits_rows, num_tokens_of
from ..transfers import to_device
from .draft_head import DraftHead

logger = logging.getLogger(__name__)


class HeadGraphs:
    """Captures passes of heads, and runs those that it has captured."""

    def __init__(
        self,
        heads: Sequence[DraftHead],
        embed: nn.Module,
        pages: KvCache,
        layout: DecodeLayout,
        capture: Capture,
        *,
        sizes: Sequence[int],
    ) -> None:
        """`heads`: the base's first, and those of slots, all of the same form. `embed`: of their
        tokens. `pages`: their own, with spare blocks. `sizes`: the numbers of rows, ascending to
        those of `layout`."""
        self._heads, self._embed, self._pages = heads, embed, pages
        self._capture = capture
        self._sizes = sizes
        head = heads[0]
        self._device = head.token_ids.device
        self._inputs = DecodeInputs(layout, pages.spare_blocks, self._device)
        size, dtype = (layout.max_rows, head.feature_sizes[1]), pages.keys[0].data.dtype
        self._features = torch.zeros(size, dtype=dtype, device=self._device)
        self._states = torch.zeros_like(self._features)
        self._logits = torch.zeros(
            layout.max_rows, len(head.token_ids), device=self._device, dtype=torch.float32
        )
        self._replays: dict[DraftHead, dict[int, Callable[[], None]]] = {}
        """By head and number of rows; without those of heads that could not be captured."""

    @torch.inference_mode()
    def capture(self) -> str:
        """Capture all sizes of each head, the largest first: the others fit in its memory.

        Returns a summary for the operator.
        """
        begun_at = time.monotonic()
        try:
            for head in self._heads:
                self._replays[head] = self._captured(head)
        except Exception:  # passes without graphs are computed eagerly
            logger.exception("no graphs for %d heads", len(self._heads) - len(self._replays))
        seconds = time.monotonic() - begun_at
        num_graphs = sum(map(len, self._replays.values()))
        return f"{num_graphs} graphs of passes captured in {seconds:.1f} s"

    def serves(self, head: DraftHead, num_pairs: int) -> bool:
        """Whether a graph of this head has rows for so many pairs."""
        return head in self._replays and num_pairs <= self._sizes[-1]

    def run(
        self, head: DraftHead, chunks: Sequence[SequenceChunk], features: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the pairs of chunks that the graphs serve with a head, of `features [num_pairs,
        hidden_size]`.

        Returns hidden states and logits, as `DraftHead.run`, of the rows whose logits are kept.
        """
        num_pairs = num_tokens_of(chunks)
        num_rows = self._sizes[bisect_left(self._sizes, num_pairs)]
        self._inputs.fill(chunks, [BASE_ROW] * num_pairs, num_rows=num_rows)
        self._features[:num_pairs].copy_(features)
        self._replays[head][num_rows]()
        kept = to_device(logits_rows(chunks), self._device)
        return self._states[kept], self._logits[kept]

    def _captured(self, head: DraftHead) -> dict[int, Callable[[], None]]:
        """By the number of rows."""
        return {
            num_rows: self._capture(partial(self._compute, head, num_rows))
            for num_rows in reversed(self._sizes)
        }

    def _compute(self, head: DraftHead, num_rows: int) -> None:
        inputs, pages = self._inputs, (self._pages.keys[0], self._pages.values[0])
        (batch,) = inputs.attention(num_rows)
        states, logits = head.run(
            self._embed(inputs.input_ids(num_rows)[None])[0],
            self._features[:num_rows],
            self._heads[0].rotation(inputs.positions(num_rows)),
            inputs.row_numbers(num_rows),
            pages,
            batch,
            is_captured=True,
        )
        self._states[:num_rows].copy_(states)
        self._logits[:num_rows].copy_(logits)


def head_layout(config: EngineConfig, group: KvGroup, max_model_len: int) -> DecodeLayout:
    """The layout of the inputs, for contexts of so many tokens."""
    return DecodeLayout(
        (group,),
        config.kv_block_size,
        max_rows(config),
        max_model_len + MAX_DRAFT_TOKENS,
        has_trees=config.drafts_trees,
    )


def head_sizes(config: EngineConfig) -> list[int]:
    """The numbers of rows that are captured."""
    return row_sizes(config.max_num_seqs, max_rows(config))


def head_graph_bytes(
    config: EngineConfig,
    *,
    feature_size: int,
    num_draft_tokens: int,
    max_model_len: int,
    num_heads: int,
) -> int:
    """Device memory of the inputs, the outputs and the graphs themselves, of so many heads.

    `feature_size`: the second of `DraftHead.feature_sizes`. `num_draft_tokens`: those that they can
    draft.
    """
    (group,) = one_group(1, 1)
    layout = head_layout(config, group, max_model_len)
    row_bytes = 4 * (2 * feature_size + num_draft_tokens)
    graph_bytes = num_heads * len(head_sizes(config)) * GRAPH_LAYER_BYTES
    return layout.num_bytes + layout.max_rows * row_bytes + graph_bytes
