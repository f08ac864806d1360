"""Decode steps as CUDA graphs: one launch instead of a thousand.

A step of few tokens runs the same kernels for any sequences and adapters; only the contents of the
tensors that the kernels read differ. It is captured once for each number of rows in a ladder of
sizes, without LoRA and with LoRA for each class of ranks, the latter also with vectors and with
LoRA on experts, and then replayed; smaller steps are padded. Each row attends separately, so draft
tokens, in trees too, and prompts with few remaining tokens are handled like decodes: the keys and
values of all rows are written before any is read. Steps that no graph supports run eagerly, with
the same results.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from itertools import chain, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from ...adapters.arena import Arena
from ...adapters.peft_config import MAX_RANK
from ...kernels.lora_batch import BASE_ROW, LoraBatch, LoraNeeds, LoraTiles
from ..config import EngineConfig
from ..kv.cache import KvCache
from ..kv.layout import KvGroup
from ..memory.device_memory import available_bytes
from ..memory.kv_budget import MIB
from ..model.base_model import BaseModel
from ..model.forward import PagedForward, StepAdapters, run_model
from ..model.inputs import (
    Integers,
    PendingTokens,
    SequenceChunk,
    logits_rows,
    num_tokens_of,
)
from ..model.layer_features import LayerFeatures
from ..model.output_head import head_inputs
from ..transfers import to_device
from .decode_inputs import DecodeInputs, DecodeLayout
from .pooling import last_hidden_states
from .sampler import finite_rows

logger = logging.getLogger(__name__)

RANK_CLASSES = (0, 16, 64, 512, MAX_RANK)
"""Graphs by the highest rank that they have room for; 0: without LoRA. A tile of the kernels is as
wide as its class up to 64 ranks, and walks higher ones."""
CLASSES_AT_START = 2
"""The number of classes captured before the first request, without vectors and LoRA on experts; the
others are captured when a step needs them."""
MAX_ROWS = 256
"""The maximum rows of a graph, unless more sequences may run: at about this size, a step is no
longer limited by reading the weights and takes longer than its launch."""
LARGE_STEP = 32
"""Rows from one size to the next above those of decodes alone: so few more cost very little."""
MAX_PROMPT_READS = 1 << 18
"""Positions that the rows of prompts read in a replayed step, each row separately: that many take
12 ms at most in an 8 B model on an H100, less than launching the step kernel by kernel; the kernels
for prompts read them once for many rows."""
NO_NEEDS = LoraNeeds(0, has_vectors=False)
"""Of a step without adapters."""

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes a function that computes a step from fixed inputs to fixed outputs; returns its replay."""


class Shape(NamedTuple):
    """The parameters of a captured graph."""

    num_rows: int
    rank: int
    """One of RANK_CLASSES."""
    has_vectors: bool = False
    """Only with LoRA: vectors of adapters are applied too; see `kernels/lora_vectors.py`."""
    has_experts: bool = False
    """Only with LoRA: adapters change experts too; see `kernels/lora_experts.py`."""


class DecodeOutput(NamedTuple):
    """Valid until the next step."""

    logits: Tensor
    """fp32 `[num_rows, vocab_size]`."""
    hidden_states: Tensor | None
    """`[num_rows, hidden_size]`: the input of the output head; None unless requested."""
    are_finite: Tensor
    """bool `[num_rows]`: whether all of a row's logits are numbers."""
    token_states: Tensor | None
    """`[num_tokens, hidden_size]` for all tokens: the output of the last layer."""
    features: Tensor | None
    """`[num_tokens, size]` for all tokens: see `LayerFeatures`; None unless requested."""

    def rows(self, kept: Integers) -> DecodeOutput:
        """The logits of these rows only, in ascending order."""
        if len(kept) == len(self.logits):
            return self
        rows, hidden = to_device(kept, self.logits.device), self.hidden_states
        return self._replace(
            logits=self.logits[rows],
            hidden_states=None if hidden is None else hidden[rows],
            are_finite=self.are_finite[rows],
        )


def max_rows(config: EngineConfig) -> int:
    """The maximum number of tokens in a step that runs as a graph: one per sequence, and in
    addition draft tokens and short prompts."""
    return max(config.max_num_seqs, min(MAX_ROWS, config.max_num_batched_tokens))


def row_sizes(max_num_seqs: int, most: int) -> list[int]:
    """The numbers of rows, up to `most`, that graphs are captured for: few rows are padded."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    size = 8
    while size < max_num_seqs:
        sizes.append(size)
        size += max(size // 64 * 8, 8)
    large = range(max_num_seqs + LARGE_STEP, most, LARGE_STEP)
    return [*sizes, max_num_seqs, *large, *([most] if most > max_num_seqs else [])]


def num_graphs_at_start(config: EngineConfig, *, has_adapters: bool) -> int:
    """Captured before the first request."""
    num_classes = CLASSES_AT_START if has_adapters else 1
    return num_classes * len(row_sizes(config.max_num_seqs, max_rows(config)))


def decode_layout(
    config: EngineConfig, base: BaseModel, groups: Sequence[KvGroup], max_model_len: int
) -> DecodeLayout:
    """The layout of the inputs of this engine's graphs."""
    return DecodeLayout(
        tuple(groups),
        config.kv_block_size,
        max_rows(config),
        max_model_len,
        has_rotary_rows=base.rotary_contexts.has_tables,
        has_trees=config.drafts_trees,
    )


class DecodeGraphs:
    """Captures decode steps, and runs those that it has captured."""

    def __init__(
        self,
        base: BaseModel,
        cache: KvCache,
        arena: Arena | None,
        layout: DecodeLayout,
        capture: Capture,
        *,
        sizes: Sequence[int],
        is_shared: bool = False,
    ) -> None:
        """`cache`: one with spare blocks. `arena`: None for a draft model, which has no adapters.
        `sizes`: the numbers of rows, ascending to those of `layout`. `is_shared`: all ranks of a
        group capture and replay the same steps together, so a capture that fails raises its error.
        """
        self._base = base
        self._is_shared = is_shared
        self._cache = cache
        self._arena = arena
        self._capture = capture
        self._side_stream = torch.cuda.Stream(base.device) if base.device.type == "cuda" else None
        self._sizes = sizes
        self._inputs = DecodeInputs(layout, cache.spare_blocks, base.device)
        size = layout.max_rows
        self._logits = torch.zeros(size, base.num_logits, device=base.device, dtype=torch.float32)
        self._are_finite = torch.zeros(size, dtype=torch.bool, device=base.device)
        self._token_states: Tensor | None = None
        """Allocated by the first step that is computed, with its dtype."""
        self._hidden_states: Tensor | None = None
        self._watched: LayerFeatures | None = None
        self._features: Tensor | None = None
        """Allocated like the token states."""
        self._replays: dict[Shape, Callable[[], None] | None] = {}
        """None: this shape could not be captured."""
        self._table = None if arena is None else arena.table
        """The table that graphs with LoRA read: a longer one invalidates them. So does one of the
        vectors, which the arena replaces together with it."""

    @property
    def max_rows(self) -> int:
        return self._sizes[-1]

    def within(self, context: Callable[[], AbstractContextManager[None]]) -> DecodeGraphs:
        """Graphs of the model as it is inside `context`, over the same inputs and outputs: an
        output of either is valid until the next step of either.

        Call it before anything is captured.
        """
        graphs = copy(self)
        graphs._replays = {}

        def capture(compute: Callable[[], None]) -> Callable[[], None]:
            def compute_inside() -> None:
                with context():
                    compute()

            return self._capture(compute_inside)

        graphs._capture = capture
        return graphs

    def capture(self, *, keeps_hidden_states: bool, features: LayerFeatures | None = None) -> str:
        """Capture the graphs that the first requests need, the largest first: the others fit in its
        memory.

        `keeps_hidden_states`: outputs include the input of the output head. `features`: and these.
        Returns a summary for the operator.
        """
        self._watched = features
        if keeps_hidden_states:
            size = (len(self._logits), self._base.embedding_size)
            self._hidden_states = torch.zeros(
                size, dtype=self._base.dtype, device=self._base.device
            )
        begun_at, free_bytes = time.monotonic(), available_bytes(self._base.device)
        for shape in self._first_shapes():
            self._replay_of(shape)
        num_captured = sum(replay is not None for replay in self._replays.values())
        taken = (free_bytes - available_bytes(self._base.device)) / MIB
        seconds = time.monotonic() - begun_at
        return f"{num_captured} decode graphs captured in {seconds:.1f} s: {taken:.1f} MiB"

    def serves(self, chunks: Sequence[SequenceChunk]) -> bool:
        """Whether a graph has rows for all tokens of these chunks, and that is no slower than the
        kernels for prompts."""
        num_rows = num_tokens_of(chunks)
        if num_rows > self.max_rows:
            return False
        if num_rows == len(chunks):
            return True
        return sum(map(_num_prompt_reads, chunks)) <= MAX_PROMPT_READS

    def run(
        self,
        chunks: Sequence[SequenceChunk],
        adapter_rows: Sequence[int] = (),
        needs: LoraNeeds = NO_NEEDS,
        pending: PendingTokens | None = None,
    ) -> DecodeOutput | None:
        """Compute chunks that it `serves`, each under the adapter of its table row, which need no
        more than `needs`; None if no graph does, and nothing has been done.

        `adapter_rows`: none without adapters. `pending`: the tokens that stand for others in the
        first chunks. The output is that of the chunks' logits rows.
        """
        adapter_rows = adapter_rows or [BASE_ROW] * len(chunks)
        num_rows = num_tokens_of(chunks)
        rows = adapter_rows
        if num_rows > len(chunks):
            rows = list(chain.from_iterable(map(_token_rows, chunks, rows)))
        shape = self._shape(num_rows, needs)
        if shape is None or (shape in self._replays and self._replays[shape] is None):
            return None
        self._inputs.fill(chunks, rows, num_rows=shape.num_rows, pending=pending)
        replay = self._replay_of(shape)
        if replay is None:
            return None
        replay()
        output = self._output(num_rows)
        return output if num_rows == len(chunks) else output.rows(logits_rows(chunks))

    def _output(self, num_rows: int) -> DecodeOutput:
        rows, hidden, states = slice(num_rows), self._hidden_states, self._token_states
        return DecodeOutput(
            self._logits[rows],
            None if hidden is None else hidden[rows],
            self._are_finite[rows],
            None if states is None else states[rows],
            None if self._features is None else self._features[rows],
        )

    def _shape(self, num_rows: int, needs: LoraNeeds) -> Shape | None:
        # Without A and B too, an adapter with vectors needs a graph with LoRA.
        rank = max(needs.rank, int(needs.has_vectors))
        size, rank_class = bisect_left(self._sizes, num_rows), bisect_left(RANK_CLASSES, rank)
        if size == len(self._sizes):
            return None
        return Shape(
            self._sizes[size], RANK_CLASSES[rank_class], needs.has_vectors, needs.has_experts
        )

    def _first_shapes(self) -> Iterator[Shape]:
        has_adapters = self._arena is not None and self._arena.capacity > 0
        classes = RANK_CLASSES[: CLASSES_AT_START if has_adapters else 1]
        for size in reversed(self._sizes):
            for rank in reversed(classes):
                yield Shape(size, rank)

    def _replay_of(self, shape: Shape) -> Callable[[], None] | None:
        """The replay of a shape whose inputs are filled: capturing computes them first.

        None: it could not be captured. Graphs that ranks share raise the error instead.
        """
        if self._arena is not None and self._table is not self._arena.table:
            self._table = self._arena.table
            self._replays = {key: replay for key, replay in self._replays.items() if not key.rank}
        if shape not in self._replays:
            try:
                self._replays[shape] = self._capture(lambda: self._compute(shape))
            except Exception:  # a shape without a graph is computed eagerly
                self._base.forget_step()
                if self._is_shared:
                    raise
                logger.exception("no graph for %d rows, rank %d, vectors: %s, experts: %s", *shape)
                self._replays[shape] = None
        return self._replays[shape]

    def _compute(self, shape: Shape) -> None:
        num_rows, inputs = shape.num_rows, self._inputs
        lora = self._lora(shape)
        # Each row has logits, so the output head's adapters are those of the rows.
        adapters = StepAdapters(lora, head=lora)
        forward = PagedForward(
            self._cache,
            inputs.attention(num_rows),
            lora,
            is_captured=True,
            rotary_rows=inputs.rotary_rows(num_rows),
        )
        with (
            head_inputs(self._base.model) as seen,
            last_hidden_states(self._base.model) as states,
            self._layer_outputs() as outputs,
            self._base.ends.changed_by(adapters, inputs.input_ids(num_rows)) as token_ids,
        ):
            logits = run_model(
                self._base.model,
                forward,
                token_ids,
                inputs.positions(num_rows),
                inputs.row_numbers(num_rows),
                out=self._logits[:num_rows],
            )
        finite_rows(logits, out=self._are_finite[:num_rows])
        if self._token_states is None:
            self._token_states = states[0].new_zeros(len(self._logits), states[0].shape[-1])
        self._token_states[:num_rows].copy_(states[0])
        if self._hidden_states is not None:
            self._hidden_states[:num_rows].copy_(seen[0][0])
        if self._watched is not None:
            with torch.inference_mode():
                features = self._watched.combined(outputs)
                if self._features is None:
                    self._features = features.new_zeros(len(self._logits), features.shape[-1])
                self._features[:num_rows].copy_(features)

    @contextmanager
    def _layer_outputs(self) -> Iterator[dict[int, Tensor]]:
        """Collects what `LayerFeatures` combines; nothing unless requested."""
        if self._watched is None:
            yield {}
            return
        with self._watched.seen() as outputs:
            yield outputs

    def _lora(self, shape: Shape) -> LoraBatch | None:
        """Sized by the capacity of the rows, not by their contents during capture."""
        num_rows, rank, has_vectors, has_experts = shape
        if not rank:
            return None
        return LoraBatch(
            token_rows=self._inputs.adapter_rows(num_rows),
            segments=(),
            adapter_rows=frozenset(),
            max_rank=rank,
            tiles=LoraTiles(self._inputs.tiles(num_rows), rank),
            side_stream=self._side_stream,
            launches_vectors=has_vectors,
            launches_experts=has_experts,
        )


class CudaCapture:
    """Captures into graphs that share their memory: one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Compute once, which compiles the kernels, then capture."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            # Around the capture too: one that fails does not give the stream back itself.
            with torch.cuda.stream(self._stream):
                compute()
                self._record(graph, compute)
        finally:
            current.wait_stream(self._stream)
        return graph.replay

    def _record(self, graph: torch.cuda.CUDAGraph, compute: Callable[[], None]) -> None:
        # Loader threads continue to copy meanwhile; this must not invalidate the capture.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            compute()


def open_decode_graphs(
    config: EngineConfig,
    model: BaseModel,
    cache: KvCache,
    arena: Arena | None = None,
    *,
    max_model_len: int,
    is_shared: bool = False,
) -> DecodeGraphs | None:
    """Of the base, or of a draft model, which has no arena. None where decode steps run kernel by
    kernel. `is_shared`: see `DecodeGraphs`."""
    if not serves_graphs(config, model):
        if _may_capture(config, model):
            waits = ", ".join(model.host_reads)
            reason = "has states" if model.has_states else f"waits for {waits}"
            logger.warning("no decode graphs: the model %s", reason)
        return None
    layout = decode_layout(config, model, cache.groups, max_model_len)
    sizes = row_sizes(config.max_num_seqs, layout.max_rows)
    capture = CudaCapture(model.device)
    return DecodeGraphs(model, cache, arena, layout, capture, sizes=sizes, is_shared=is_shared)


def _token_rows(chunk: SequenceChunk, row: int) -> Iterator[int]:
    """The table row of the adapter that acts on each token."""
    num_base_tokens = chunk.num_base_tokens
    return chain(
        repeat(BASE_ROW, num_base_tokens), repeat(row, len(chunk.token_ids) - num_base_tokens)
    )


def _num_prompt_reads(chunk: SequenceChunk) -> int:
    num_tokens = len(chunk.token_ids)
    return num_tokens * (chunk.place + num_tokens) if num_tokens > 1 and chunk.is_prompt else 0


def serves_graphs(config: EngineConfig, base: BaseModel) -> bool:
    """Whether decode steps of this base run as graphs: on CUDA, unless disabled, or the model has
    states or its own code reads tensors on the host."""
    return _may_capture(config, base) and not base.has_states and not base.host_reads


def _may_capture(config: EngineConfig, base: BaseModel) -> bool:
    """Whether graphs are enabled on this device."""
    return _is_captured(base.device) and not config.enforce_eager


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda"
