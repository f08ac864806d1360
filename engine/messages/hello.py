"""The first message of each end of a link between machines."""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL = 1
"""The version of the messages. Ends of different versions do not talk to each other."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a link is for. Both ends state it, and it has to be the same.

    A later version may add fields, which are ignored here, but keeps these.
    """

    base_id: str
    """As in `EngineInfo`."""
    runtime_id: str
    """As in `EngineInfo`."""
    incarnation: str
    """The life of the replica: an agent makes a new one when it starts, and an API server names
    the one that it means to reach."""
    protocol: int = PROTOCOL
