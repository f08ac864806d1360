"""The description of a change for the audit log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from ..base import JsonObject
from ..keys.principal import SYSTEM, Actor, ActorKind
from ..sessions import Guard

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a change: actor, request and client address."""

    actor: Actor
    request_id: str | None = None
    address: str | None = None
    guard: Guard | None = None
    """Of the transactions of its changes: refuses those of a request that was given up."""


BY_SYSTEM = Origin(SYSTEM)


class Party(NamedTuple):
    """An actor, and the chain in which its refusals are logged."""

    tenant_id: str | None
    """None: in the platform's."""
    actor: Actor


UNKNOWN = Party(None, Actor(ActorKind.USER, "unknown", "unknown"))
"""A party for unknown accounts: the typed name may be anything, even a password."""


@dataclass(frozen=True, slots=True)
class Event:
    """The description of a change."""

    action: str
    """`noun.verb`, such as `key.revoke`."""
    resource: str
    """By the name that callers use."""
    details: JsonObject = field(default_factory=dict)
    """The changed values as JSON; never a secret."""


@dataclass(frozen=True, slots=True)
class Changed(Generic[Result]):
    """The result of a change and its audit event; None if nothing changed."""

    result: Result
    event: Event | None
