"""Incremental detokenization with stop strings.

However the tokens arrive, the concatenated pieces equal the decoding of the whole. A character is
emitted once its last byte has arrived. Text that may be the beginning of a stop string is held back
until it is not one.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from .tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # how a decoder shows bytes that are not (yet) a character
_MAX_CHARACTER_BYTES = 4
_CONTEXT_TOKENS = 8
_MAX_WINDOW_TOKENS = 4 * _CONTEXT_TOKENS


class Piece(NamedTuple):
    """The next part of the text."""

    text: str
    num_tokens: int
    """The number of tokens that belong to the output, without those after a stop string."""
    stop: str | None = None
    """The stop string that was completed; nothing follows."""


class Detokenizer:
    """The text of one output.

    With `prompt_token_ids` the text continues the prompt's (completions): a leading space of its
    first word is kept. Without, it is independent (chats). The output ends before the stop string
    that is completed first, the longest if there are several, or after it with `include_stop`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        num_unstopped_tokens: int = 0,
        visible_token_ids: Collection[int] = (),
        observe: Callable[[str], None] | None = None,
    ) -> None:
        """Of special tokens only `visible_token_ids` are part of the text. No stop string begins
        within the text of the first `num_unstopped_tokens`. `observe` is called with the text of
        each token that `push` takes, before stop strings apply."""
        make_decoder = _ByteDecoder if tokenizer.decodes_bytes else _WindowDecoder
        self._decoder = make_decoder(tokenizer, prompt_token_ids, visible_token_ids)
        self._stops = _StopFinder(stop, include_stop=include_stop) if any(stop) else None
        self._num_unstopped = num_unstopped_tokens
        self._observe = observe
        self._stopped = False

    @property
    def has_stops(self) -> bool:
        return self._stops is not None

    def push_one(self, token_id: int) -> str:
        """Like `push` of this token without stop strings, at a fraction of its cost."""
        return "" if self._stopped else self._decoder.push(token_id)

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Take generated tokens; give the text that is certain."""
        texts: list[str] = []
        for num_tokens, token_id in enumerate(token_ids, start=1):
            if self._stopped:
                return Piece("".join(texts), 0)
            text = self._decoder.push(token_id)
            if self._observe is not None:
                self._observe(text)
            if self._num_unstopped > 0:
                self._num_unstopped -= 1
                texts.append(text)
                continue
            text, stop = self._scan(text)
            texts.append(text)
            if stop is not None:
                return Piece("".join(texts), num_tokens, stop)
        return Piece("".join(texts), len(token_ids))

    def finish(self) -> Piece:
        """The output is complete: return the text that was held back."""
        if self._stopped:
            return Piece("", 0)
        text, stop = self._scan(self._decoder.flush())
        self._stopped = True
        held = self._stops.held if self._stops is not None and stop is None else ""
        return Piece(text + held, 0, stop)

    def _scan(self, text: str) -> tuple[str, str | None]:
        if self._stops is None or not text:
            return text, None
        text, stop = self._stops.push(text)
        self._stopped = stop is not None
        return text, stop


class _ByteDecoder:
    """If every token stands for its own bytes, the text is the concatenation of the bytes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        visible_token_ids: Collection[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._visible_token_ids = visible_token_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside = False
        """Inside a character, whose other bytes are still to come."""
        for token_id in prompt_token_ids[-_CONTEXT_TOKENS:]:
            self._decode(tokenizer.decoded_bytes(token_id))

    def push(self, token_id: int) -> str:
        if token_id in self._visible_token_ids:
            return self.flush() + self._tokenizer.token_text(token_id)
        if not self._is_inside:
            text = self._tokenizer.whole_text(token_id)
            if text is not None:
                return text
        return self._decode(self._tokenizer.decoded_bytes(token_id))

    def flush(self) -> str:
        self._is_inside = False
        return self._utf8.decode(b"", final=True)

    def _decode(self, data: bytes) -> str:
        text = self._utf8.decode(data)
        self._is_inside = bool(self._utf8.getstate()[0])
        return text


class _WindowDecoder:
    """Decodes a window of the last tokens; the window starts at the end of a character.

    Decoding is not local: a first word loses its space, and byte tokens are meaningful only in
    complete runs. So a token is decoded after at least `_CONTEXT_TOKENS` others.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        visible_token_ids: Collection[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._visible_token_ids = visible_token_ids
        self._window = self._prompt_context(prompt_token_ids)
        text = tokenizer.decode(self._window)
        self._num_emitted = len(text.rstrip(_REPLACEMENT))
        """Characters of the window's text that were emitted already or belong to the prompt."""
        self._num_complete = len(self._window)
        """Tokens of the window up to the last one that ended a character."""
        self._cut = 0 if text.endswith(_REPLACEMENT) else len(self._window)
        """An earlier such place: where the window is cut when it has grown."""

    def push(self, token_id: int) -> str:
        if token_id in self._visible_token_ids:
            return self._restart() + self._tokenizer.token_text(token_id)
        if token_id in self._tokenizer.special_token_ids:
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        num_certain = self._num_certain(text)
        new = text[self._num_emitted : num_certain]
        self._num_emitted = max(self._num_emitted, num_certain)
        self._shrink_window(text)
        return new

    def flush(self) -> str:
        text = self._tokenizer.decode(self._window)
        new = text[self._num_emitted :]
        self._num_emitted = len(text)
        return new

    def _restart(self) -> str:
        """The text that was held back; later tokens are decoded independently of it."""
        held = self.flush()
        self._window, self._num_emitted, self._num_complete, self._cut = [], 0, 0, 0
        return held

    def _num_certain(self, text: str) -> int:
        """Characters of `text` that no further token can change."""
        if not text.endswith(_REPLACEMENT):
            self._num_complete = len(self._window)
            return len(text)
        if len(self._window) - self._num_complete < _MAX_CHARACTER_BYTES:
            return self._num_emitted
        # Bytes that never become a character: only the last ones can still be the start of one.
        num_broken = len(text) - len(text.rstrip(_REPLACEMENT))
        return len(text) - min(num_broken, _MAX_CHARACTER_BYTES - 1)

    def _shrink_window(self, text: str) -> None:
        is_complete = self._num_complete == len(self._window)
        if is_complete and len(self._window) - self._cut >= _CONTEXT_TOKENS:
            start = self._cut
        elif len(self._window) >= _MAX_WINDOW_TOKENS:
            start = len(self._window) - _CONTEXT_TOKENS
        else:
            return
        num_held = len(text) - self._num_emitted
        self._window = self._window[start:]
        self._num_emitted = len(self._tokenizer.decode(self._window)) - num_held
        self._num_complete = max(self._num_complete - start, 0)
        self._cut = len(self._window) if is_complete else 0

    def _prompt_context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The prompt's end, begun where a character begins."""
        special = self._tokenizer.special_token_ids
        tail = [i for i in prompt_token_ids[-2 * _CONTEXT_TOKENS :] if i not in special]
        for skip in range(min(_MAX_CHARACTER_BYTES, len(tail))):
            if not self._tokenizer.decode(tail[skip:]).startswith(_REPLACEMENT):
                return tail[skip:]
        return tail


class _StopFinder:
    """Finds the first stop string in text that arrives in pieces.

    Each stop string has an automaton (Knuth, Morris and Pratt), so the cost per character does not
    depend on the length of the strings, and the result does not depend on the boundaries of the
    pieces.
    """

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool) -> None:
        # Longest first: of those completed by the same character, the longest ends the output.
        self._automata = [_Automaton(s) for s in sorted(filter(None, stop), key=len, reverse=True)]
        self._include_stop = include_stop
        self.held = ""
        """Text that may be the beginning of a stop string."""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that no stop string can claim, and the stop string if one was completed."""
        num_before = len(self.held)
        text = self.held + text
        for end in range(num_before + 1, len(text) + 1):
            stop = self._advance(text[end - 1])
            if stop is not None:
                self.held = ""
                return text[: end if self._include_stop else end - len(stop)], stop
        num_held = max(automaton.num_matched for automaton in self._automata)
        self.held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def _advance(self, character: str) -> str | None:
        completed = [a.pattern for a in self._automata if a.advance(character)]
        return completed[0] if completed else None


class _Automaton:
    """The length of the pattern's prefix with which the text ends."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.num_matched = 0
        self._fallback = [0] * len(pattern)
        """Per number of matched characters: the next shorter beginning that still matches."""
        for index in range(1, len(pattern)):
            self._fallback[index] = self._step(self._fallback[index - 1], pattern[index])

    def advance(self, character: str) -> bool:
        """Take one character; True once the whole pattern is matched."""
        self.num_matched = self._step(self.num_matched, character)
        return self.num_matched == len(self.pattern)

    def _step(self, num_matched: int, character: str) -> int:
        while num_matched and self.pattern[num_matched] != character:
            num_matched = self._fallback[num_matched - 1]
        return num_matched + (self.pattern[num_matched] == character)
