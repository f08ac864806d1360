"""The state of one output in its grammar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ..draft import ROOT, Draft
from ..errors import GrammarFailed


class Automaton(Protocol):
    """The used part of `llguidance.LLMatcher`. It never raises; it reports a failure as its
    state."""

    def consume_tokens(self, sampled_tokens: list[int]) -> bool: ...

    def try_consume_tokens(self, tokens: list[int]) -> int: ...

    def validate_tokens(self, tokens: list[int]) -> int: ...

    def rollback(self, num_tokens: int) -> bool: ...

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None: ...

    def is_stopped(self) -> bool: ...

    def is_error(self) -> bool: ...

    def deep_copy(self) -> Automaton: ...


class Executor(Protocol):
    """The used part of `llguidance.LLExecutor`: computes many masks at once, on its own threads."""

    def unsafe_compute_mask_ptr(
        self,
        interpreters: list[tuple[Automaton, int]],
        trg_pointer: int,
        one_mask_bytes: int,
        trg_batch_size: int,
    ) -> None: ...


class Matcher:
    """Owned by a request; it has consumed the whole output so far."""

    def __init__(
        self, automaton: Automaton, *, end_token_ids: frozenset[int], ignores_end: bool
    ) -> None:
        """`end_token_ids`: the tokens that end an output; `ignores_end`: allow them only if nothing
        else is allowed."""
        self.automaton = automaton
        self.end_token_ids = end_token_ids
        self.ignores_end = ignores_end
        self._end = min(end_token_ids)  # an adapter's own are beyond the base's

    def accept(self, token_ids: Sequence[int]) -> None:
        """Follow the output; none of these tokens but the last may end it. Raises GrammarFailed."""
        self.automaton.consume_tokens(self._known(token_ids))
        if self.has_failed:
            raise GrammarFailed

    @property
    def has_failed(self) -> bool:
        """Whether it cannot continue: the library's limits were reached, or no token is allowed."""
        return self.automaton.is_error()

    def cut(self, draft: Draft) -> Draft:
        """The part of a draft that the grammar allows; nothing after the end of the output."""
        if draft.parents is None:
            return draft.only(range(self._num_allowed(draft.token_ids)))
        return draft.only(sorted(self.walk(draft)))

    @contextmanager
    def behind(self, token_ids: Sequence[int]) -> Iterator[bool]:
        """Inside the context the matcher is positioned after these tokens, if they are allowed."""
        num_taken = 0
        for token in self._known(token_ids):
            if not self._take(token):
                break
            num_taken += 1
        try:
            yield num_taken == len(token_ids)
        finally:
            if num_taken:
                self.automaton.rollback(num_taken)

    def walk(self, draft: Draft) -> Iterator[int]:
        """The indices of the draft's tokens that the grammar allows. While the caller processes an
        index, the matcher is positioned after that token; at the end it is where it was before."""
        children: dict[int, list[int]] = {}
        for index in range(len(draft)):
            children.setdefault(draft.parent(index), []).append(index)
        yield from self._walk(self._known(draft.token_ids), children, ROOT)

    def _walk(
        self, tokens: Sequence[int], children: dict[int, list[int]], parent: int
    ) -> Iterator[int]:
        for index in children.get(parent, ()):
            if self._take(tokens[index]):
                yield index
                yield from self._walk(tokens, children, index)
                self.automaton.rollback(1)

    def _take(self, token: int) -> bool:
        """Advance by one token, if it is allowed."""
        # After it has stopped, the automaton must not be called.
        return not self.automaton.is_stopped() and bool(self.automaton.try_consume_tokens([token]))

    def _num_allowed(self, token_ids: Sequence[int]) -> int:
        """For a chain. After the last token of a complete output there is nothing to propose."""
        if self.automaton.is_stopped():
            return 0
        return self.automaton.validate_tokens(self._known(token_ids))

    def _known(self, token_ids: Sequence[int]) -> list[int]:
        """The automaton knows one token that ends the output; they all mean the same."""
        return [self._end if token in self.end_token_ids else token for token in token_ids]
