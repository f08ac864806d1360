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
from ..checkpoint.files import locate_heads
from ..config import EngineConfig
from ..draft import NO_DRAFT, Draft
from ..errors import InvalidParameter, UnsupportedModel
from ..kv.cache import KvCache, KvFormat
from ..kv.groups import LayerKvShape, one_group
from ..memory.demands import EagleDemand
from ..memory.kv_demands import block_bytes
from ..model.base_model import BaseModel, weight_format
from ..model.layer_features import LayerFeatures
from ..model.load_quantization import LoadQuantization
from ..model.rope import RotaryContexts
from ..request import Request
from ..transfers import to_device
from .adapter_heads import AdapterHeads
from .chain_inputs import ChainInputs
from .draft_cache import CachedSequence, DraftCache
from .drawing import DraftDrawing, GrowingChain, draw_next, make_drawing, takes_largest
from .eagle_checkpoint import load_head
from .eagle_head import EagleHead
from .head_values import num_values, outline, with_values
from .packed_head import PackedHead, Rotation
from .proposer import DraftRequest

NAME = "eagle"
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
    head: PackedHead
    sequence: CachedSequence
    token_ids: Sequence[int]
    """Of the next pairs: first of the known ones that are not computed, then of a draft token."""
    features: Tensor
    """`[len(token_ids), hidden_size]`: what is known of the tokens before them."""

    @property
    def place(self) -> int:
        """That of the next pairs, after those that are computed and those of draft tokens."""
        return self.sequence.num_computed + max(len(self.chain.token_ids) - 1, 0)


class EagleHeadSteps:
    """Runs the base's head, and those of adapters in its place, over one paged cache."""

    def __init__(
        self, loaded: LoadedEagle, pages: KvCache, adapters: AdapterHeads | None = None
    ) -> None:
        """`adapters`: None if heads of adapters are not served."""
        self.head = loaded.head
        self.adapters = adapters
        self.pages = pages
        base = loaded.base
        self._embed: nn.Module = loaded.embedding or base.model.get_input_embeddings()
        self._device = base.device

    def head_of(self, request: Request) -> PackedHead:
        own = None if self.adapters is None else self.adapters.find(request.lease)
        return self.head if own is None else own

    def lay_out(self, drafting: Sequence[_Drafting], num_passes: int) -> EaglePasses:
        """Passes of these: in the first of their next pairs, in the others of a pair for each."""
        inputs = ChainInputs(
            [entry.place for entry in drafting],
            [len(entry.token_ids) for entry in drafting],
            [entry.sequence.tables[0] for entry in drafting],
            num_passes,
            block_size=self.pages.block_size,
            device=self._device,
        )
        return EaglePasses(inputs, self.head.rotation(inputs.positions))

    def run(
        self,
        head: PackedHead,
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
        pages = self.pages.keys[0], self.pages.values[0]
        last_rows, batch = inputs.last_rows(index), inputs.attention(index)
        return head.run(embedded, features, rotation, last_rows, pages, batch)


class EaglePasses(NamedTuple):
    """See `EagleHeadSteps.lay_out`."""

    inputs: ChainInputs
    rotation: Rotation
    """Of the rows of all passes."""


class EagleProposer:
    """Proposes chains for all requests at once: one pass of the head per token."""

    name = NAME
    needs_hidden_states = False

    def __init__(
        self,
        steps: EagleHeadSteps,
        features: LayerFeatures,
        *,
        max_model_len: int,
        drawing: DraftDrawing,
        ends: Callable[[Request, int], bool],
    ) -> None:
        """`features`: those that `steps` reads. `max_model_len`: the tokens of a context at most;
        an endless output begins it anew. `ends`: whether a token ends a request's output; nothing
        is drafted behind it."""
        (group,) = steps.pages.groups
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

    @torch.inference_mode()
    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        try:
            if self._steps.adapters is not None:
                self._steps.adapters.begin_call()
            drafting = self._begin(wanted)
            for group in _by_head(drafting.values()):
                self._propose(group)
        except BaseException:
            # The state of an interrupted call is unknown.
            for request, _ in wanted:
                self.forget(request.request_id)
            raise
        return [
            drafting[request].chain.draft() if request in drafting else NO_DRAFT
            for request, _ in wanted
        ]

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

    def _propose(self, drafting: list[_Drafting]) -> None:
        """Compute the known pairs, draft after them, compute the draft tokens' pairs, and so on.
        All have the same head."""
        growing = drafting
        while growing:
            growing = self._grow(growing)

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

    def _lay_out(self, drafting: Sequence[_Drafting], num_passes: int) -> EaglePasses:
        self._steps.pages.execute(self.cache.take_operations())
        return self._steps.lay_out(drafting, num_passes)

    def _compute(
        self, drafting: Sequence[_Drafting], passes: EaglePasses, index: int
    ) -> tuple[Tensor, Tensor]:
        """The hidden state of each one's last pair, and its logits."""
        features = [entry.features for entry in drafting]
        return self._steps.run(
            drafting[0].head,
            passes,
            index,
            [token for entry in drafting for token in entry.token_ids],
            features[0] if len(features) == 1 else torch.cat(features),
        )

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


@dataclass(frozen=True, slots=True, eq=False)
class LoadedEagle:
    """A head on the device, before its cache exists."""

    head: PackedHead
    embedding: nn.Embedding | None
    """Its own; None: it reads the base's."""
    features: LayerFeatures
    base: BaseModel
    outline: EagleHead
    """Its form, without values."""
    head_id: str
    """See `EagleCheckpoint.head_id`."""

    @property
    def form(self) -> DraftHeadForm:
        """Of adapters' heads that can run in its place."""
        return DraftHeadForm(self.head_id, num_values(self.outline))

    @property
    def weight_bytes(self) -> int:
        own = 0 if self.embedding is None else self.embedding.weight.nbytes
        return self.head.weight_bytes + own

    @property
    def kv_shape(self) -> LayerKvShape:
        config = self.head.config
        return LayerKvShape(config.num_key_value_heads, config.head_dim, config.head_dim)

    @property
    def kv_format(self) -> KvFormat:
        return KvFormat(self.base.dtype)

    def demand(self, config: EngineConfig) -> EagleDemand:
        (group,) = one_group(1, 2)
        fc = self.head.fc
        step = config.max_num_batched_tokens * (fc.in_features + fc.out_features)
        pending = config.max_num_seqs * MAX_PENDING * fc.out_features
        packed_bytes = config.adapter_draft_heads * self.form.num_values * self.base.dtype.itemsize
        return EagleDemand(
            self.weight_bytes,
            block_bytes(config, group, [[self.kv_shape]], self.kv_format),
            int(step + pending) * self.base.dtype.itemsize + packed_bytes,
        )

    def pack(self, values: Tensor) -> PackedHead:
        """An adapter's head of the form `form`."""
        head = with_values(self.outline, values)
        return PackedHead(head, LoadQuantization(), fc=self.head.fc)

    def open(
        self, config: EngineConfig, arena: Arena, *, num_blocks: int, max_model_len: int
    ) -> EagleProposer:
        """The proposer, with so many blocks of cache, for the adapters of this arena."""
        pages = KvCache(
            one_group(1, num_blocks + 1),
            [self.kv_shape],
            block_size=config.kv_block_size,
            kv_format=self.kv_format,
            device=self.base.device,
        )
        return EagleProposer(
            EagleHeadSteps(self, pages, self.adapter_heads(config, arena)),
            self.features,
            max_model_len=max_model_len,
            drawing=make_drawing(config.acceptance),
            ends=lambda request, token: token in request.end_token_ids,
        )

    def adapter_heads(self, config: EngineConfig, arena: Arena) -> AdapterHeads | None:
        room = config.adapter_draft_heads
        return AdapterHeads(arena, self.pack, room) if room else None


def load_eagle(config: EngineConfig, base: BaseModel) -> LoadedEagle | None:
    """The head of `eagle:CHECKPOINT`, loaded before the memory plan, which includes it; None if
    the configuration has none. Raises InvalidParameter if it cannot be used."""
    entries = [entry.partition(":") for entry in config.speculation]
    checkpoints = [checkpoint for name, _, checkpoint in entries if name == NAME]
    if not checkpoints:
        return None
    if not checkpoints[0]:
        raise InvalidParameter("speculation", f"{NAME} requires a checkpoint: {NAME}:CHECKPOINT")
    try:
        folder = locate_heads(checkpoints[0])
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
        raise InvalidParameter("speculation", f"{NAME}: {exc}") from exc
    embedding = loaded.embedding
    return LoadedEagle(
        head,
        None if embedding is None else embedding.to(base.device),
        features,
        base,
        outline(loaded.head),
        loaded.head_id,
    )


def _quantization(config: EngineConfig) -> LoadQuantization:
    """That of the base, but for layers that are excluded there."""
    return LoadQuantization(weight_format(config.quantization), config.quantization_group_size)
