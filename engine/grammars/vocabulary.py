"""The base's vocabulary for grammars: the bytes of each token."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

from ..text.tokenizer import Tokenizer

_MARK = "\x02"
"""A character that merges with no other: a tokenizer that puts a space before a text puts it before
this one."""


class Vocabulary:
    """The vocabulary interface of `llguidance.LLTokenizer`.

    The bytes are those of `Tokenizer.token_bytes`, which also produce the output's text, so grammar
    and text agree for every kind of tokenizer.
    """

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, end_token_ids: frozenset[int]):
        """`vocab_size`: the model's, which may be padded. `end_token_ids`: at least one."""
        self.eos_token_id = min(end_token_ids)
        special = tokenizer.special_token_ids | end_token_ids
        self.special_token_ids: Sequence[int] = sorted(
            token for token in special if token < vocab_size
        )
        self.tokens: Sequence[bytes] = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        # Its own: text that reads like a special token is text here.
        self._backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        self._backend.encode_special_tokens = True
        self._marked = self._encode(_MARK)
        self._ids: dict[bytes, int] = {}

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text that the grammar leaves no choice about, as the base writes it."""
        data = text.encode()
        for token_ids in (self._encode(text), self._behind_mark(text)):
            if token_ids is not None and self._bytes(token_ids) == data:
                return token_ids
        return self._longest_matches(data)

    def _encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _behind_mark(self, text: str) -> list[int] | None:
        token_ids, start = self._encode(_MARK + text), len(self._marked)
        return token_ids[start:] if token_ids[:start] == self._marked else None

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(self.tokens[token] for token in token_ids if token < len(self.tokens))

    def _longest_matches(self, data: bytes) -> list[int]:
        ids = self._ids or self._index()
        longest = max(map(len, ids))
        token_ids, start = [], 0
        while start < len(data):
            for end in range(min(start + longest, len(data)), start, -1):
                if (token := ids.get(data[start:end])) is not None:
                    token_ids.append(token)
                    start = end
                    break
            else:
                break  # a byte without a token: the rest is the beginning of a character
        return token_ids

    def _index(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        self._ids = {
            data: token for token, data in enumerate(self.tokens) if data and token not in special
        }
        return self._ids
