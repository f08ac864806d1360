"""The names of compositions: the adapters that a request adds up, and their weights.

    adapter[:weight]+adapter[:weight]…

Each adapter may have a version, alias or digest; no weight means 1. Adapters' names contain
neither `+` nor `:`, so no name of an adapter reads as a composition.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import NamedTuple

from ...adapters.identity import DIGEST_PREFIX
from ..errors import InvalidComposition, ModelNotFound

MAX_MEMBERS = 4
MAX_WEIGHT = 2.0
MAX_PINNED_LENGTH = 640
"""Four of the longest names with tenant, version and weight."""

_MAX_WEIGHT_CHARACTERS = 24
_WEIGHT_CHARACTERS = frozenset(string.digits + ".-")


class NamedMember(NamedTuple):
    """An adapter as a request names it, and the factor of its delta."""

    name: str
    weight: float = 1.0


def parse_members(model: str) -> list[NamedMember]:
    """Take a name apart; a plain name is one member of weight 1.

    Raises ModelNotFound if nothing can have this name, InvalidComposition.
    """
    members = []
    for text in model.split("+"):
        before, prefix, after = text.partition("@" + DIGEST_PREFIX)  # its colon is no weight's
        name, has_weight, weight = (after if prefix else before).partition(":")
        full_name = before + prefix + name if prefix else name
        members.append(NamedMember(full_name, _parse_weight(weight, model) if has_weight else 1.0))
    return members


def check_members(members: Sequence[NamedMember]) -> None:
    """Raises InvalidComposition for too many members or a weight out of range."""
    if len(members) > MAX_MEMBERS:
        raise InvalidComposition(f"A composition has at most {MAX_MEMBERS} adapters.")
    for member in members:
        if not -MAX_WEIGHT <= member.weight <= MAX_WEIGHT:
            raise InvalidComposition(
                f"The weight of {member.name!r} must be from {-MAX_WEIGHT:g} to {MAX_WEIGHT:g}."
            )


def _parse_weight(text: str, model: str) -> float:
    if len(text) > _MAX_WEIGHT_CHARACTERS or not _WEIGHT_CHARACTERS.issuperset(text):
        raise ModelNotFound(model)
    try:
        return float(text)
    except ValueError:
        raise ModelNotFound(model) from None
