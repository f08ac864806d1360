"""Pages of a prompt's prefix on their way from the replica that computed it to the one that
decodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The blocks of one KV group."""

    indices: list[int]
    """Their places among the blocks of the prompt, ascending. Those that the token after the prefix
    does not see are missing."""
    pages: list[bytes]
    """For each tensor of the group the contents of these blocks, codes and scales as they are:
    `[layers, blocks, ...]`."""


@dataclass(frozen=True, slots=True)
class PrefixPiece:
    """From the engine, for a request with `exports_prefix`; to the engine, for one with
    `awaits_prefix`. Pieces come in the order of their blocks."""

    request_id: str
    groups: list[GroupPages]
    """One for each KV group; empty: the request gets no more than it has."""
    is_last: bool
    """The request waits no longer."""
