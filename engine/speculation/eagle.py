"""A proposer with an EAGLE-3 head (Li et al. 2025).

Each step shows it the features of the tokens that the step computed, under the request's adapter.
From them it computes the keys and values of its own layer, when it drafts or enough have come
together, and drafts token after token from its own hidden states. Features that it has not seen,
as those of a prompt's cached prefix, are missing in its context alone: that costs accepted tokens
and never changes the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...adapters.arena import Arena
from ...adapters.draft_head import DraftHeadForm
from ...kernels.linear import Linear
from ..checkpoint.files import locate_heads
from ..config import TREE_PROPOSERS, EngineConfig
from ..draft import NO_DRAFT, Draft
from ..errors import InvalidParameter, UnsupportedModel
from ..execution import decode_graphs
from ..execution.decode_graphs import serves_graphs
from ..kv.cache import KvCache, KvFormat
from ..kv.groups import one_group
from ..memory.demands import EagleDemand
from ..memory.kv_demands import block_bytes
from ..model.base_model import BaseModel, weight_format
from ..model.inputs import SequenceChunk, make_inputs
from ..model.layer_features import LayerFeatures
from ..model.load_quantization import LoadQuantization
from ..model.rope import RotaryContexts
from ..request import Request
from ..transfers import to_device
from .adapter_heads import AdapterHeads
from .chain_inputs import ChainInputs
from .draft_cache import CachedSequence, DraftCache
from .draft_head import DraftHead, Pages, Rotation
from .drawing import (
    DraftDrawing,
    GrowingChain,
    draw_next,
    make_drawing,
    takes_largest,
)
from .eagle_checkpoint import load_head
from .eagle_head import EagleHead
from .growing_tree import GrowingTree, Level
from .head_graphs import HeadGraphs, head_graph_bytes, head_layout, head_sizes
from .head_slot import HeadSlot
from .head_values import num_values, outline
from .packed_head import PackedHead
from .proposer import DraftRequest
from .tree_growth import LevelOutput, grow_trees

NAME, TREES = "eagle", "eagle_tree"
MAX_PENDING = 64
"""The features of a request that are kept: then their keys and values are computed."""


@dataclass(slots=True)
class _Pending:
    """The features of a request's last tokens, whose keys and values are not computed."""

    start: int
    """The position of the first token."""
    begun_at: int
    """The position of the first token of its context."""
    features: list[Tensor] = field(default_factory=list)
    """`[num_tokens, hidden_size]` of each step."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.features))

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def take(self, num_tokens: int) -> Tensor:
        """Remove the first ones."""
        features = self.features[0] if len(self.features) == 1 else torch.cat(self.features)
        rest = features[num_tokens:]
        self.features = [rest] if len(rest) else []
        self.start += num_tokens
        return features[:num_tokens]


@dataclass(eq=False, slots=True)
class _Drafting:
    """A request for which a draft is being computed."""

    chain: GrowingChain
    head: DraftHead
    sequence: CachedSequence
    token_ids: Sequence[int]
    """Of the next pairs: first of the known ones that are not computed, then of a draft token."""
    features: Tensor
    """`[len(token_ids), hidden_size]`: what is known of the tokens before them."""

    @property
    def place(self) -> int:
        """That of the next pairs, after those that are computed and those of draft tokens."""
        return self.sequence.num_computed + max(len(self.chain.token_ids) - 1, 0)

    def chunk(self) -> SequenceChunk:
        """The next pairs, of which the last one's logits are kept."""
        return SequenceChunk(self.token_ids, self.place, self.sequence.tables)


class EagleHeadSteps:
    """Runs the base's head, and those of adapters in its place, over one paged cache."""

    def __init__(
        self,
        loaded: LoadedEagle,
        pages: KvCache,
        adapters: AdapterHeads | None = None,
        graphs: HeadGraphs | None = None,
    ) -> None:
        """`adapters`: None if heads of adapters are not served. `graphs`: of all heads; None where
        passes run kernel by kernel."""
        self.head = loaded.head
        self.adapters = adapters
        self.pages = pages
        self.graphs = graphs
        self._embed = loaded.embed
        self._device = loaded.base.device

    def head_of(self, request: Request) -> DraftHead:
        own = None if self.adapters is None else self.adapters.find(request.lease)
        return self.head if own is None else own

    def lay_out(self, drafting: Sequence[_Drafting], num_passes: int) -> EaglePasses | None:
        """Passes of these: in the first of their next pairs, in the others of a pair for each.
        None: graphs serve all of them."""
        if self._are_served(drafting[0].head, sum(len(entry.token_ids) for entry in drafting)):
            return None
        inputs = ChainInputs(
            [entry.place for entry in drafting],
            [len(entry.token_ids) for entry in drafting],
            [entry.sequence.tables[0] for entry in drafting],
            num_passes,
            block_size=self.pages.block_size,
            device=self._device,
        )
        return EaglePasses(inputs, self.head.rotation(inputs.positions))

    def _are_served(self, head: DraftHead, num_pairs: int) -> bool:
        """Whether graphs serve so many pairs with this head."""
        return self.graphs is not None and self.graphs.serves(head, num_pairs)

    def run(
        self,
        head: DraftHead,
        passes: EaglePasses,
        index: int,
        token_ids: Sequence[int],
        features: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute the pairs of a pass with a head, of these tokens and `features [num_pairs,
        hidden_size]`.

        Returns hidden states `[num_chains, hidden_size]` and logits, as `PackedHead.run`, of the
        last pair of each chain.
        """
        inputs, own = passes.inputs, passes.inputs.rows(index)
        rotation = Rotation(*(part[own] for part in passes.rotation))
        embedded = self._embed(to_device(token_ids, self._device)[None])[0]
        last_rows, batch = inputs.last_rows(index), inputs.attention(index)
        return head.run(embedded, features, rotation, last_rows, self._own_pages, batch)

    def run_levels(
        self, head: DraftHead, levels: Sequence[SequenceChunk], features: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the pairs of these levels of trees, or of chains, with a head, of
        `features [num_pairs, hidden_size]`.

        Returns the same of the rows whose logits are kept.
        """
        if self.graphs is not None and self._are_served(head, len(features)):
            return self.graphs.run(head, levels, features)
        inputs = make_inputs(
            levels,
            groups=self.pages.groups,
            block_size=self.pages.block_size,
            device=self._device,
        )
        embedded = self._embed(inputs.input_ids[None])[0]
        rotation = self.head.rotation(inputs.positions)
        kept, (batch,) = inputs.logits_rows, inputs.attention
        return head.run(embedded, features, rotation, kept, self._own_pages, batch)

    @property
    def _own_pages(self) -> Pages:
        return self.pages.keys[0], self.pages.values[0]


class EaglePasses(NamedTuple):
    """See `EagleHeadSteps.lay_out`."""

    inputs: ChainInputs
    rotation: Rotation
    """Of the rows of all passes."""


class EagleProposer:
    """Proposes chains for all requests at once: one pass of the head per token."""

    needs_hidden_states = False

    def __init__(
        self,
        steps: EagleHeadSteps,
        features: LayerFeatures,
        *,
        max_model_len: int,
        drawing: DraftDrawing,
        ends: Callable[[Request, int], bool],
        name: str = NAME,
    ) -> None:
        """`features`: those that `steps` reads. `max_model_len`: the tokens of a context at most;
        an endless output begins it anew. `ends`: whether a token ends a request's output; nothing
        is drafted behind it."""
        (group,) = steps.pages.groups
        self.name = name
        self.features = features
        # Nothing outlives its request: what the head computes depends on its adapter.
        self.cache = DraftCache(
            group,
            steps.pages.block_size,
            rotary_contexts=RotaryContexts((max_model_len,)),
            prefix_secret=None,
        )
        self._steps = steps
        self._drawing = drawing
        self._ends = ends
        self._max_model_len = max_model_len
        self._pending: dict[str, _Pending] = {}

    def capture(self) -> list[str]:
        """Capture its graphs, before the first step; returns a summary for the operator."""
        graphs = self._steps.graphs
        return [] if graphs is None else [f"{self.name}: {graphs.capture()}"]

    @torch.inference_mode()
    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        try:
            if self._steps.adapters is not None:
                self._steps.adapters.begin_call()
            drafting = self._begin(wanted)
            made: dict[Request, Draft] = {}
            for group in _by_head(drafting.values()):
                requests = [entry.chain.request for entry in group]
                made.update(zip(requests, self._draft(group), strict=True))
        except BaseException:
            # The state of an interrupted call is unknown.
            for request, _ in wanted:
                self.forget(request.request_id)
            raise
        return [made.get(request, NO_DRAFT) for request, _ in wanted]

    def observe(self, request: Request, hidden_state: Tensor | None) -> None:
        """It learns from features alone."""

    @torch.inference_mode()
    def observe_features(self, request: Request, start: int, features: Tensor) -> None:
        """See `FeatureProposer`."""
        asked = request.submitted.speculation
        if asked is not None and asked.is_off:
            return
        pending = self._pending.get(request.request_id)
        if pending is None or start > pending.end or self._exceeds(pending, start + len(features)):
            # What lies between was never seen, or there is too much: its context begins anew.
            self.forget(request.request_id)
            pending = self._pending[request.request_id] = _Pending(start, begun_at=start)
        unseen = features[pending.end - start :]  # a request that was preempted computes again
        if len(unseen):
            # A copy: the rows themselves would hold on to all of their step's.
            pending.features.append(unseen.clone())
        if pending.num_tokens > MAX_PENDING:
            self._catch_up(request, pending)

    def _exceeds(self, pending: _Pending, end: int) -> bool:
        return end - pending.begun_at > self._max_model_len

    def forget(self, request_id: str) -> None:
        self._pending.pop(request_id, None)
        self.cache.drop(request_id)

    def _catch_up(self, request: Request, pending: _Pending) -> None:
        """Compute all but the last of the pending pairs, which the next draft begins with."""
        num_tokens = pending.num_tokens - 1
        if not self._reserve(request, num_tokens, ()):
            self.forget(request.request_id)
            return
        drafting = self._drafting(request, pending, num_tokens, num_draft_tokens=0)
        self._compute([drafting], self._lay_out([drafting], num_passes=1), 0)
        self.cache.advance(request, num_tokens)

    def _begin(self, wanted: Sequence[DraftRequest]) -> dict[Request, _Drafting]:
        """Those whose last token's features are there, and for which there is room."""
        drafting: dict[Request, _Drafting] = {}
        for request, num_draft_tokens in wanted:
            pending = self._pending.get(request.request_id)
            if pending is None or pending.end != len(request.token_ids) - 1:
                continue
            num_tokens = pending.num_tokens
            if not num_tokens:
                continue
            keep = [each.request_id for each in drafting]
            if self._reserve(request, num_tokens + num_draft_tokens - 1, keep):
                drafting[request] = self._drafting(request, pending, num_tokens, num_draft_tokens)
        return drafting

    def _reserve(self, request: Request, num_tokens: int, keep: Sequence[str]) -> bool:
        self.cache.settle(request)
        return self.cache.reserve(request.request_id, num_tokens, keep)

    def _drafting(
        self, request: Request, pending: _Pending, num_tokens: int, num_draft_tokens: int
    ) -> _Drafting:
        first = pending.start + 1
        return _Drafting(
            GrowingChain(request, num_draft_tokens),
            self._steps.head_of(request),
            self.cache.settle(request),
            request.token_ids[first : first + num_tokens],
            pending.take(num_tokens),
        )

    def _draft(self, drafting: list[_Drafting]) -> list[Draft]:
        """Compute the known pairs, draft after them, compute the draft tokens' pairs, and so on.
        All have the same head."""
        growing = drafting
        while growing:
            growing = self._grow(growing)
        return [entry.chain.draft() for entry in drafting]

    def _grow(self, drafting: list[_Drafting]) -> list[_Drafting]:
        """Draft for all until one of them has its tokens. Returns those that want more."""
        num_passes = min(entry.chain.num_missing for entry in drafting)
        passes = self._lay_out(drafting, num_passes)
        growing = drafting
        for index in range(num_passes):
            states, logits = self._compute(drafting, passes, index)
            for entry in drafting:
                if not entry.chain.token_ids:
                    self.cache.advance(entry.chain.request, len(entry.token_ids))
            growing = self._draw(drafting, states, logits)
            if len(growing) < len(drafting):
                break
        return growing

    def _lay_out(self, drafting: Sequence[_Drafting], num_passes: int) -> EaglePasses | None:
        self._steps.pages.execute(self.cache.take_operations())
        return self._steps.lay_out(drafting, num_passes)

    def _compute(
        self, drafting: Sequence[_Drafting], passes: EaglePasses | None, index: int
    ) -> tuple[Tensor, Tensor]:
        """The hidden state of each one's last pair, and its logits."""
        each, head = [entry.features for entry in drafting], drafting[0].head
        features = each[0] if len(each) == 1 else torch.cat(each)
        if passes is None:
            return self._steps.run_levels(head, [entry.chunk() for entry in drafting], features)
        token_ids = [token for entry in drafting for token in entry.token_ids]
        return self._steps.run(head, passes, index, token_ids, features)

    def _draw(
        self, drafting: Sequence[_Drafting], states: Tensor, logits: Tensor
    ) -> list[_Drafting]:
        """Draft a token for each from its hidden state; return those that want another.

        One whose logits are not finite is given up: its cache holds what must not be used.
        """
        largest, places = logits.max(-1)
        finite = largest.isfinite().tolist()  # of a row with NaN it is NaN
        if not all(finite):
            for entry, is_finite in zip(drafting, finite, strict=True):
                if not is_finite:
                    self.forget(entry.chain.request.request_id)
            drafting = [entry for entry, sound in zip(drafting, finite, strict=True) if sound]
            states, logits, places = states[finite], logits[finite], places[finite]
        if not drafting:
            return []
        head, chains = self._steps.head, [entry.chain for entry in drafting]
        # A draft has a distribution for each of its tokens, or for none.
        if all(takes_largest(chain.request) and not chain.probabilities for chain in chains):
            for chain, token in zip(chains, head.token_ids[places].tolist(), strict=True):
                chain.token_ids.append(token)
        else:
            draw_next(chains, head.whole_logits(logits), self._drawing)
        for entry, state in zip(drafting, states.split(1), strict=True):
            entry.token_ids, entry.features = entry.chain.token_ids[-1:], state
        return [entry for entry in drafting if self._goes_on(entry.chain)]

    def _goes_on(self, chain: GrowingChain) -> bool:
        return chain.wants_more and not self._ends(chain.request, chain.token_ids[-1])


def _by_head(drafting: Iterable[_Drafting]) -> Iterable[list[_Drafting]]:
    groups: dict[int, list[_Drafting]] = {}
    for entry in drafting:
        groups.setdefault(id(entry.head), []).append(entry)
    return groups.values()


class EagleTreeProposer(EagleProposer):
    """Proposes trees for all requests at once: one pass of the head per level."""

    def _draft(self, drafting: list[_Drafting]) -> list[Draft]:
        """Compute the known pairs, then level after level while a tree may get likelier nodes."""
        head = drafting[0].head
        output = self._compute(drafting, self._lay_out(drafting, num_passes=1), 0)
        for entry in drafting:
            self.cache.advance(entry.chain.request, len(entry.token_ids))
        trees = [
            GrowingTree(
                entry.chain.request,
                entry.chain.num_tokens,
                SequenceChunk([], entry.sequence.num_computed, entry.sequence.tables),
            )
            for entry in drafting
        ]

        def compute(levels: Sequence[Level]) -> LevelOutput:
            read = [node.features for level in levels for node in level.nodes]
            features = torch.stack([each for each in read if each is not None])
            chunks = [level.chunk for level in levels]
            return _level_output(*self._steps.run_levels(head, chunks, features))

        def give_up(tree: GrowingTree) -> None:
            self.forget(tree.request.request_id)

        return grow_trees(trees, _level_output(*output), compute, give_up, self._steps.head)


def _level_output(states: Tensor, logits: Tensor) -> LevelOutput:
    finite = logits.max(-1).values.isfinite().tolist()  # of a row with NaN it is NaN
    return LevelOutput(logits, finite, states)


@dataclass(frozen=True, slots=True, eq=False)
class AdaptableHead:
    """What is needed to run an adapter's head in the place of the base's."""

    outline: EagleHead
    """Its form, without values."""
    head_id: str
    """See `EagleCheckpoint.head_id`."""
    fc: Linear
    """The projection of the features, which all share."""

    @property
    def form(self) -> DraftHeadForm:
        """Of adapters' heads."""
        return DraftHeadForm(self.head_id, num_values(self.outline))

    def make_slots(self, number: int, dtype: torch.dtype) -> list[HeadSlot]:
        """Memory for so many heads of this form, in the dtype of the adapters' weights."""
        return [HeadSlot(self.outline, self.fc, dtype) for _ in range(number)]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedEagle:
    """A head on the device, before its cache exists."""

    head: DraftHead
    embedding: nn.Embedding | None
    """Its own; None: it reads the base's."""
    features: LayerFeatures
    base: BaseModel
    name: str = NAME
    adaptable: AdaptableHead | None = None
    """None: adapters cannot bring heads of their own."""

    @property
    def embed(self) -> nn.Module:
        return self.embedding or self.base.model.get_input_embeddings()

    @property
    def weight_bytes(self) -> int:
        own = 0 if self.embedding is None else self.embedding.weight.nbytes
        return self.head.weight_bytes + own

    @property
    def kv_format(self) -> KvFormat:
        return KvFormat(self.base.dtype)

    def demand(self, config: EngineConfig) -> EagleDemand:
        (group,) = one_group(1, 2)
        form = self.adapter_form(config)
        slots = config.adapter_draft_heads * form.num_values if form else 0
        values = read_values(config, self.head.feature_sizes) + slots
        graphs = 0
        if serves_graphs(config, self.base):
            num_heads = 1 + (config.adapter_draft_heads if form else 0)
            graphs = head_graph_bytes(
                config,
                feature_size=self.head.feature_sizes[1],
                num_draft_tokens=len(self.head.token_ids),
                max_model_len=self.base.max_model_len,
                num_heads=num_heads,
            )
        return EagleDemand(
            self.weight_bytes,
            block_bytes(config, group, [[self.head.kv_shape]], self.kv_format),
            values * self.base.dtype.itemsize + graphs,
            self.name,
        )

    def open(
        self, config: EngineConfig, arena: Arena, *, num_blocks: int, max_model_len: int
    ) -> EagleProposer:
        """The proposer, with so many blocks of cache, for the adapters of this arena."""
        pages = KvCache(
            one_group(1, num_blocks + 1),
            [self.head.kv_shape],
            block_size=config.kv_block_size,
            kv_format=self.kv_format,
            device=self.base.device,
            has_spare_blocks=serves_graphs(config, self.base),
        )
        slots: list[HeadSlot] = []
        if self.adaptable is not None:
            slots = self.adaptable.make_slots(config.adapter_draft_heads, self.base.dtype)
        heads = [self.head, *(slot.head for slot in slots)]
        graphs = self._open_graphs(config, heads, pages, max_model_len)
        kind = EagleTreeProposer if self.name in TREE_PROPOSERS else EagleProposer
        return kind(
            EagleHeadSteps(self, pages, AdapterHeads(arena, slots) if slots else None, graphs),
            self.features,
            max_model_len=max_model_len,
            drawing=make_drawing(config.acceptance),
            ends=lambda request, token: token in request.end_token_ids,
            name=self.name,
        )

    def _open_graphs(
        self,
        config: EngineConfig,
        heads: Sequence[DraftHead],
        pages: KvCache,
        max_model_len: int,
    ) -> HeadGraphs | None:
        if not serves_graphs(config, self.base):
            return None
        (group,) = pages.groups
        layout = head_layout(config, group, max_model_len)
        capture = decode_graphs.CudaCapture(self.base.device)
        return HeadGraphs(heads, self.embed, pages, layout, capture, sizes=head_sizes(config))

    def adapter_form(self, config: EngineConfig) -> DraftHeadForm | None:
        """Of adapters' heads that are served; None: none are."""
        if not config.adapter_draft_heads or self.adaptable is None:
            return None
        return self.adaptable.form


def read_values(config: EngineConfig, feature_sizes: tuple[int, int]) -> int:
    """The values that a head of these sizes (see `DraftHead`) keeps of a full step and of tokens
    that are not computed yet."""
    size_read, size = feature_sizes
    step = config.max_num_batched_tokens * (size_read + size)
    return step + config.max_num_seqs * MAX_PENDING * size


def load_eagle(config: EngineConfig, base: BaseModel) -> LoadedEagle | None:
    """The head of `eagle:CHECKPOINT` or `eagle_tree:CHECKPOINT`, loaded before the memory plan,
    which includes it; None if the configuration has none. Raises InvalidParameter if it cannot be
    used."""
    entries = [entry.partition(":") for entry in config.speculation]
    given = next((entry for entry in entries if entry[0] in (NAME, TREES)), None)
    if given is None:
        return None
    name, _, checkpoint = given
    if not checkpoint:
        raise InvalidParameter("speculation", f"{name} requires a checkpoint: {name}:CHECKPOINT")
    try:
        folder = locate_heads(checkpoint)
        loaded = load_head(
            folder,
            hidden_size=base.embedding_size,
            vocab_size=base.vocab_size,
            num_layers=base.config.num_hidden_layers,
            base_id=base.layout.base_id,
            dtype=base.dtype,
        )
        head = PackedHead(loaded.head.to(base.device), _quantization(config))
        features = LayerFeatures(base.model, base.config, loaded.layers, head.fc)
        features.check(base.model, base.config)
    except UnsupportedModel as exc:
        raise InvalidParameter("speculation", f"{name}: {exc}") from exc
    embedding = loaded.embedding
    return LoadedEagle(
        head,
        None if embedding is None else embedding.to(base.device),
        features,
        base,
        name,
        AdaptableHead(outline(loaded.head), loaded.head_id, head.fc),
    )


def _quantization(config: EngineConfig) -> LoadQuantization:
    """That of the base, but for layers that are excluded there."""
    return LoadQuantization(weight_format(config.quantization), config.quantization_group_size)
