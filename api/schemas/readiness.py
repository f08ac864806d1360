"""Response schemas of a server's readiness and confinement, for operators."""

from __future__ import annotations

from dataclasses import dataclass

from ..contract.answer_model import AnswerModel


@dataclass(frozen=True, slots=True)
class MechanismView(AnswerModel):
    """One confinement mechanism of the examining process."""

    name: str
    """`namespaces`, `landlock`, `limits` or `seccomp`."""
    is_in_force: bool
    """As measured when the server started."""
    detail: str
    """What it prevents, or why it is not in force and what to do."""


@dataclass(frozen=True, slots=True)
class PossibleActView(AnswerModel):
    """An action that no mechanism prevents in the examining process."""

    act: str
    reason: str


@dataclass(frozen=True, slots=True)
class ConfinementView(AnswerModel):
    """How this server confines the process that examines an adapter."""

    is_complete: bool
    """Namespaces, Landlock and limits are in force, as `--require-confinement` requires."""
    mechanisms: list[MechanismView]
    possible: list[PossibleActView]


@dataclass(frozen=True, slots=True)
class ServerReadinessView(AnswerModel):
    """Whether this server accepts generation requests, and how it examines adapters."""

    is_ready: bool
    reason: str | None
    """Why it is not ready."""
    confinement: ConfinementView
