"""Counts the tokens of a request, for penalties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Counted(NamedTuple):
    """Distinct tokens, `[num_distinct]` each."""

    token_ids: NDArray[np.int64]
    num_in_output: NDArray[np.float32]
    """How often the output has each; 0: only the prompt has it."""


class TokenCounts:
    """The distinct tokens of prompt and output. They are kept from step to step, so a prompt is
    read once."""

    def __init__(self, prompt: Sequence[int]) -> None:
        # Sorted, so that logits are read in their order.
        token_ids = np.unique(np.fromiter(prompt, np.int64, len(prompt)))
        self._index = {token: index for index, token in enumerate(token_ids.tolist())}
        self._reserved = _grown(Counted(token_ids, np.zeros(len(token_ids), np.float32)))
        self._num_tokens = len(prompt)

    def follow(self, token_ids: Sequence[int]) -> None:
        """`token_ids`: prompt and output, at least those of the call before."""
        for token in token_ids[self._num_tokens :]:
            index = self._index.setdefault(token, len(self._index))
            if index == len(self._reserved.token_ids):
                self._reserved = _grown(self._reserved)
            self._reserved.token_ids[index] = token
            self._reserved.num_in_output[index] += 1
        self._num_tokens = len(token_ids)

    def counted(self, draft_tokens: Sequence[int] = ()) -> Counted:
        """The counts if these were the next tokens; to read only, until the next call of
        `follow`."""
        size = len(self._index)
        counted = Counted(self._reserved.token_ids[:size], self._reserved.num_in_output[:size])
        if not draft_tokens:
            return counted
        new = [token for token in dict.fromkeys(draft_tokens) if token not in self._index]
        index_of_new = {token: size + index for index, token in enumerate(new)}
        token_ids = np.append(counted.token_ids, np.array(new, np.int64))
        num_in_output = np.append(counted.num_in_output, np.zeros(len(new), np.float32))
        for token in draft_tokens:
            index = self._index.get(token)
            num_in_output[index_of_new[token] if index is None else index] += 1
        return Counted(token_ids, num_in_output)


def _grown(counted: Counted) -> Counted:
    """A copy with space for more."""
    size = len(counted.token_ids)
    num_more = 64 + size // 4
    return Counted(
        np.append(counted.token_ids, np.zeros(num_more, np.int64)),
        np.append(counted.num_in_output, np.zeros(num_more, np.float32)),
    )
