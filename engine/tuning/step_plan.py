"""Which examples each step trains. The same recipe and data give the same plan in every process."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

SequenceExamples = list[int]
"""The indices of the examples of one sequence; more than one if it is packed."""


class StepPlan:
    """The sequences of every step.

    Each epoch has all examples, in an order that the seed and the epoch's number decide. A packed
    sequence takes the next examples as long as they fit.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        num_epochs: int,
        batch_size: int,
        seed: int,
        packed_tokens: int | None,
    ) -> None:
        """lengths: tokens by example. packed_tokens: of a packed sequence; None: no packing."""
        self._lengths = lengths
        self._batch_size = batch_size
        self._seed = seed
        self._packed_tokens = packed_tokens
        num_sequences = (sum(1 for _ in self._sequences(e)) for e in range(num_epochs))
        self._ends = list(accumulate(-(-number // batch_size) for number in num_sequences))
        self._epoch = -1
        self._epoch_sequences: list[SequenceExamples] = []

    @property
    def num_steps(self) -> int:
        return self._ends[-1]

    def ends_epoch(self, num_done: int) -> bool:
        """Whether an epoch is complete after so many steps."""
        return num_done in self._ends

    def sequences(self, step: int) -> list[SequenceExamples]:
        """Those of the step with this number, from 0."""
        epoch = bisect_right(self._ends, step)
        if epoch != self._epoch:
            self._epoch, self._epoch_sequences = epoch, list(self._sequences(epoch))
        first = (step - (self._ends[epoch - 1] if epoch else 0)) * self._batch_size
        return self._epoch_sequences[first : first + self._batch_size]

    def num_tokens(self, step: int) -> int:
        return sum(self._lengths[i] for sequence in self.sequences(step) for i in sequence)

    def _sequences(self, epoch: int) -> Iterator[SequenceExamples]:
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._lengths))
        if self._packed_tokens is None:
            yield from ([int(index)] for index in order)
            return
        sequence, room = list[int](), self._packed_tokens
        for index in map(int, order):
            if sequence and self._lengths[index] > room:
                yield sequence
                sequence, room = [], self._packed_tokens
            sequence.append(index)
            room -= self._lengths[index]
        yield sequence
