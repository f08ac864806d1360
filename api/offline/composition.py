"""The weighted sum of several adapters that are folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...adapters.identity import composed_key
from ...platform.adapters.composition_names import NamedMember, check_members
from ...platform.errors import AdapterNotComposable, InvalidComposition
from .adapters import TENANT_ID, Adapter
from .errors import llm_error


class Member(NamedTuple):
    """An adapter, the folder that the caller gave, and the factor of its delta."""

    folder: str
    adapter: Adapter
    weight: float


def check_weights(weights: Mapping[str, float]) -> None:
    """Raise LLMError for too many members or a weight out of range; `weights` by folder."""
    try:
        check_members([NamedMember(folder, weight) for folder, weight in weights.items()])
    except InvalidComposition as exc:
        raise llm_error(exc) from exc


def compose(members: Sequence[Member]) -> Adapter:
    """The adapter that adds up these deltas; the adapter itself if it is one of weight 1.

    Raises LLMError if two are the same content, or one has more than LoRA matrices.
    """
    if len(members) == 1 and members[0].weight == 1.0:
        return members[0].adapter
    weights = {member.adapter.key.digest: member.weight for member in members}
    if len(weights) < len(members):
        raise llm_error(InvalidComposition("Two adapters of the composition are the same content."))
    for member in members:
        if not member.adapter.is_composable:
            raise llm_error(AdapterNotComposable(member.folder))
    return Adapter(composed_key(TENANT_ID, weights))
