"""How many of a base's own draft tokens are right after the prefixes of texts, measured greedily.

Drafts are computed as they are served: each prefix has the keys and values of the whole base, and
the draft's own follow them in a paged cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from random import Random

from torch import Tensor

from ..errors import InvalidParameter
from ..kv.cache import KvCache
from ..kv.groups import simple_groups
from ..kv.sequence_blocks import BlockTable, block_table
from ..model.base_model import BaseModel
from ..model.drafting_part import DraftingPart
from ..model.forward import PagedForward, run_decoder, run_model
from ..model.inputs import SequenceChunk, StepInputs, make_inputs
from .training_texts import TrainingText

BLOCK_SIZE = 16
MAX_PASS_TOKENS = 2048
"""Tokens of a pass over prefixes."""


@dataclass(eq=False)
class _Place:
    """A prefix, and what the base says after it."""

    prefix: Sequence[int]
    table: BlockTable
    answer: list[int] = field(default_factory=list)
    """Tokens of the whole base, up to the first that ends its output."""

    @property
    def start(self) -> int:
        """The position of the last known token, with which a draft begins."""
        return len(self.prefix) - 1


class DraftTrial:
    """Compares drafts of parts of a base with its own tokens."""

    def __init__(
        self, base: BaseModel, prefixes: Sequence[Sequence[int]], *, num_tokens: int
    ) -> None:
        """`prefixes`: of two tokens or more each. `num_tokens`: of a draft. Raises InvalidParameter
        if there is no prefix."""
        if not prefixes:
            raise InvalidParameter("texts", "no text leaves room for a draft")
        self.num_tokens = num_tokens
        self._base = base
        counts = [-(-(len(prefix) + num_tokens + 1) // BLOCK_SIZE) for prefix in prefixes]
        self._cache = KvCache(
            simple_groups(base.kv_shapes, 1 + sum(counts)),
            base.kv_shapes,
            block_size=BLOCK_SIZE,
            kv_format=base.kv_format,
            device=base.device,
        )
        blocks = iter(range(1, 1 + sum(counts)))
        self._places = [
            _Place(prefix, block_table([next(blocks) for _ in range(count)]))
            for prefix, count in zip(prefixes, counts, strict=True)
        ]
        self._read_prefixes()
        self._answer()

    @property
    def num_prefixes(self) -> int:
        return len(self._places)

    def accepted(self, part: DraftingPart) -> list[float]:
        """The share of the prefixes after which the first, second, … draft token of this part is
        right, and so are those before it."""
        places, shares = self._places, []
        with part.only():
            for place in range(self.num_tokens):
                places = [each for each in places if len(each.answer) > place]
                drafted = self._next(places, place)
                places = [
                    each
                    for each, token in zip(places, drafted, strict=True)
                    if token == each.answer[place]
                ]
                shares.append(len(places) / len(self._places))
        return shares

    def run_one(self, num_rows: int, part: DraftingPart | None = None) -> None:
        """Compute so many tokens after the longest prefix, as a draft (1 row) or its verification
        does, and wait for the device. `part`: None for the whole base."""
        longest = max(self._places, key=lambda each: len(each.prefix))
        tokens = [longest.prefix[-1]] * num_rows
        chunk = self._chunk(longest, tokens, longest.start, num_logits_rows=num_rows)
        within: AbstractContextManager[None] = nullcontext() if part is None else part.only()
        with within:
            self._logits([chunk]).argmax(dim=-1).tolist()

    def _read_prefixes(self) -> None:
        """Keys and values of all known tokens but the last of each prefix."""
        waiting: list[SequenceChunk] = []
        for place in self._places:
            for start in range(0, place.start, MAX_PASS_TOKENS):
                tokens = place.prefix[start : min(start + MAX_PASS_TOKENS, place.start)]
                chunk = self._chunk(place, tokens, start, num_logits_rows=0)
                if sum(len(each.token_ids) for each in [*waiting, chunk]) > MAX_PASS_TOKENS:
                    self._store(waiting)
                    waiting = []
                waiting.append(chunk)
        self._store(waiting)

    def _answer(self) -> None:
        places = self._places
        for depth in range(self.num_tokens):
            for place, token in zip(places, self._next(places, depth), strict=True):
                place.answer.append(token)
            ends = self._base.eos_token_ids
            places = [each for each in places if each.answer[-1] not in ends]

    def _next(self, places: Sequence[_Place], depth: int) -> list[int]:
        """The most likely tokens after the prefixes and `depth` tokens of their answers, the last
        of which is computed here."""
        chunks = [
            self._chunk(
                place,
                [place.answer[depth - 1] if depth else place.prefix[-1]],
                place.start + depth,
                num_logits_rows=1,
            )
            for place in places
        ]
        if not chunks:
            return []
        tokens: list[int] = self._logits(chunks).argmax(dim=-1).tolist()
        return tokens

    def _chunk(
        self, place: _Place, tokens: Sequence[int], start: int, *, num_logits_rows: int
    ) -> SequenceChunk:
        return SequenceChunk(
            tokens,
            start,
            [place.table],
            num_logits_rows=num_logits_rows,
            rotary_start=self._base.rotary_contexts.start(len(place.prefix) + self.num_tokens),
        )

    def _store(self, chunks: Sequence[SequenceChunk]) -> None:
        inputs = self._inputs(chunks)
        forward = PagedForward.of(self._cache, inputs)
        run_decoder(self._base.model, forward, inputs.input_ids, inputs.positions)

    def _logits(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """fp32 `[num_logits_rows, vocab_size]`"""
        inputs = self._inputs(chunks)
        forward = PagedForward.of(self._cache, inputs)
        rows = inputs.logits_rows
        return run_model(self._base.model, forward, inputs.input_ids, inputs.positions, rows)

    def _inputs(self, chunks: Sequence[SequenceChunk]) -> StepInputs:
        return make_inputs(
            sorted(chunks, key=lambda chunk: len(chunk.token_ids) > 1),
            groups=self._cache.groups,
            block_size=BLOCK_SIZE,
            device=self._base.device,
        )


def prefixes_of(
    texts: Sequence[TrainingText], count: int, *, max_tokens: int
) -> list[Sequence[int]]:
    """`count` prefixes of these texts, of up to so many tokens, fewer if there are no more. They
    are drawn, always the same, from all that end before a token to learn."""
    ends = [
        (text, end)
        for text in texts
        for end in range(max(2, text.num_context_tokens), min(len(text.token_ids), max_tokens + 1))
    ]
    drawn = Random(0).sample(ends, min(count, len(ends)))
    return [text.token_ids[:end] for text, end in drawn]
