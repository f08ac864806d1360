"""What operators are told about whether, and how safely, a server takes requests."""

from __future__ import annotations

import msgspec


class MechanismView(msgspec.Struct, frozen=True):
    """One mechanism that confines the process which examines an adapter."""

    name: str
    """`namespaces`, `landlock`, `limits` or `seccomp`."""
    is_in_force: bool
    """As measured when the server started."""
    detail: str
    """What it prevents; or why it is not in force, and what to do."""


class PossibleActView(msgspec.Struct, frozen=True):
    """What that process could do although it should not."""

    act: str
    reason: str


class ConfinementView(msgspec.Struct, frozen=True):
    """How the process that examines an adapter is confined on this server."""

    is_complete: bool
    """Namespaces, Landlock and limits are in force: `--require-confinement` would let it start."""
    mechanisms: list[MechanismView]
    possible: list[PossibleActView]


class ServerReadinessView(msgspec.Struct, frozen=True):
    """Whether this server takes generations, and how it examines adapters."""

    is_ready: bool
    reason: str | None
    """Why it is not ready."""
    confinement: ConfinementView
