"""The description of a change for the audit log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from ..base import JsonObject
from ..keys.principal import SYSTEM, Actor, ActorKind

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a change comes from: who makes it, by which request, from which address."""

    actor: Actor
    request_id: str | None = None
    address: str | None = None


BY_SYSTEM = Origin(SYSTEM)


class Party(NamedTuple):
    """Somebody, and in whose chain stands what they were refused."""

    tenant_id: str | None
    """None: in the platform's."""
    actor: Actor


UNKNOWN = Party(None, Actor(ActorKind.USER, "unknown", "unknown"))
"""Who named an account that there is not: what was typed may be anything, a password too."""


@dataclass(frozen=True, slots=True)
class Event:
    """What was changed."""

    action: str
    """`noun.verb`, such as `key.revoke`."""
    resource: str
    """By the name that callers use."""
    details: JsonObject = field(default_factory=dict)
    """What is different now, as JSON; never a secret."""


@dataclass(frozen=True, slots=True)
class Changed(Generic[Result]):
    """What a change answers, and what is to be written down of it; nothing changed without."""

    result: Result
    event: Event | None
