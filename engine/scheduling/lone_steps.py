"""Running suspects apart: each in a forward of its own, after all others.

Who was in a step in which the engine broke down may be the cause or only have been there. Alone, a
request answers for itself: another breakdown is its own doing, and an answer clears it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .batch import ScheduledSequence

Part = tuple[ScheduledSequence, ...]


def parts_of(sequences: Sequence[ScheduledSequence]) -> Iterator[Part]:
    """The sequences in the parts of the step that are run one after another."""
    others = tuple(each for each in sequences if not each.request.num_lone_steps)
    if others:
        yield others
    for sequence in sequences:
        if sequence.request.num_lone_steps:
            sequence.request.num_lone_steps -= 1
            yield (sequence,)
