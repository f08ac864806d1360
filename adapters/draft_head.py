"""A draft head that an adapter brings along: one vector beside its matrices.

The vector holds the parameters of the head one after another, in the order of
`engine/speculation/head_values`. Its name says by an id what the head reads: the features and draft
tokens of the base's head that it continues. An engine that serves another base's head, or none,
does without it. PEFT ignores the tensor.
"""

from __future__ import annotations

from typing import NamedTuple

ID_CHARACTERS = 64
"""Lower-case hex digits of a SHA-256."""


class DraftHeadForm(NamedTuple):
    """The heads that an engine serves."""

    head_id: str
    num_values: int


def is_head_id(text: str) -> bool:
    return len(text) == ID_CHARACTERS and set(text) <= set("0123456789abcdef")
