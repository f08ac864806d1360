"""Counts the tokens of a request, for penalties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Counted(NamedTuple):
    """The tokens that penalties concern."""

    token_ids: NDArray[np.int64]
    """Distinct tokens of prompt and output."""
    output_ids: NDArray[np.int64]
    """Distinct tokens of the output, `[num_distinct]`."""
    num_in_output: NDArray[np.float32]
    """How often the output has each of `output_ids`."""


class TokenCounts:
    """The distinct tokens of prompt and output. They are kept from step to step, so a prompt is
    read once."""

    def __init__(self, prompt: Sequence[int]) -> None:
        # Sorted, so that logits are read in their order.
        token_ids = np.unique(np.fromiter(prompt, np.int64, len(prompt)))
        self._seen = set(token_ids.tolist())
        self._token_ids = _grown(token_ids)
        self._output_index: dict[int, int] = {}
        self._output_ids = _grown(np.zeros(0, np.int64))
        self._num_in_output = _grown(np.zeros(0, np.float32))
        self._num_tokens = len(prompt)

    def follow(self, token_ids: Sequence[int]) -> None:
        """`token_ids`: prompt and output, at least those of the call before."""
        for token in token_ids[self._num_tokens :]:
            if token not in self._seen:
                self._see(token)
            index = self._output_index.setdefault(token, len(self._output_index))
            if index == len(self._output_ids):
                self._output_ids = _grown(self._output_ids)
                self._num_in_output = _grown(self._num_in_output)
            self._output_ids[index] = token
            self._num_in_output[index] += 1
        self._num_tokens = len(token_ids)

    def _see(self, token: int) -> None:
        size = len(self._seen)
        if size == len(self._token_ids):
            self._token_ids = _grown(self._token_ids)
        self._token_ids[size] = token
        self._seen.add(token)

    def counted(self, draft_tokens: Sequence[int] = ()) -> Counted:
        """The counts if these were the next tokens; to read only, until the next call of
        `follow`."""
        num_distinct = len(self._output_index)
        counted = Counted(
            self._token_ids[: len(self._seen)],
            self._output_ids[:num_distinct],
            self._num_in_output[:num_distinct],
        )
        return _after(counted, draft_tokens, self._seen, self._output_index)


def _after(
    counted: Counted, draft_tokens: Sequence[int], seen: set[int], output_index: dict[int, int]
) -> Counted:
    """Copies of the counts with the draft tokens."""
    if not draft_tokens:
        return counted
    distinct = list(dict.fromkeys(draft_tokens))
    unseen = [token for token in distinct if token not in seen]
    new = [token for token in distinct if token not in output_index]
    index_of_new = {token: index for index, token in enumerate(new, len(output_index))}
    num_in_output = np.append(counted.num_in_output, np.zeros(len(new), np.float32))
    for token in draft_tokens:
        indices = output_index if token in output_index else index_of_new
        num_in_output[indices[token]] += 1
    return Counted(
        np.append(counted.token_ids, np.array(unseen, np.int64)),
        np.append(counted.output_ids, np.array(new, np.int64)),
        num_in_output,
    )


def _grown(array: NDArray[Any]) -> NDArray[Any]:
    """A copy with space for more."""
    return np.append(array, np.zeros(64 + len(array) // 4, array.dtype))
