"""A composition: the weighted sum of several adapters of a tenant."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...adapters.identity import AdapterKey, composed_key
from ..errors import AdapterNotComposable, InvalidComposition
from .registry import AdapterRef


class ResolvedMember(NamedTuple):
    """A member from a request's admission to its end."""

    adapter: AdapterRef
    weight: float


@dataclass(frozen=True)
class Composition:
    """Adapters whose deltas are added, as the request orders them."""

    members: tuple[ResolvedMember, ...]

    def __post_init__(self) -> None:
        """Raises InvalidComposition if two members are the same content, AdapterNotComposable if
        one has more than LoRA matrices."""
        if len({member.adapter.key for member in self.members}) < len(self.members):
            raise InvalidComposition("Two adapters of the composition are the same version.")
        for member in self.members:
            if not member.adapter.is_composable:
                raise AdapterNotComposable(member.adapter.pinned)

    @cached_property
    def key(self) -> AdapterKey:
        """Its identity in all layers below."""
        weights = {member.adapter.key.digest: member.weight for member in self.members}
        return composed_key(self.members[0].adapter.key.tenant_id, weights)

    @cached_property
    def pinned(self) -> str:
        """The name that always means these versions: `tenant/a@3+tenant/b@1:0.5`."""
        return "+".join(
            member.adapter.pinned + ("" if member.weight == 1.0 else f":{member.weight!r}")
            for member in self.members
        )
