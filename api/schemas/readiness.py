"""Response schemas of a server's readiness and confinement, for operators."""

from __future__ import annotations

import msgspec


class MechanismView(msgspec.Struct, frozen=True):
    """One confinement mechanism of the examining process."""

    name: str
    """`namespaces`, `landlock`, `limits` or `seccomp`."""
    is_in_force: bool
    """As measured when the server started."""
    detail: str
    """What it prevents, or why it is not in force and what to do."""


class PossibleActView(msgspec.Struct, frozen=True):
    """An action that no mechanism prevents in the examining process."""

    act: str
    reason: str


class ConfinementView(msgspec.Struct, frozen=True):
    """How this server confines the process that examines an adapter."""

    is_complete: bool
    """Namespaces, Landlock and limits are in force, as `--require-confinement` requires."""
    mechanisms: list[MechanismView]
    possible: list[PossibleActView]


class ServerReadinessView(msgspec.Struct, frozen=True):
    """Whether this server accepts generation requests, and how it examines adapters."""

    is_ready: bool
    reason: str | None
    """Why it is not ready."""
    confinement: ConfinementView
