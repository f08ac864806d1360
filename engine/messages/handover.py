"""Pages of a prompt's prefix on their way from the replica that computed it to the one that
decodes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PrefixTransport(StrEnum):
    """How pages travel; see `page_transport`."""

    FRAMES = "frames"
    """In the messages, over the links of the fleet."""
    MEMORY = "memory"
    """In memory that engines of one host share."""


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The blocks of one KV group."""

    indices: list[int]
    """Their places among the blocks of the prompt, ascending. Those that the token after the prefix
    does not see are missing."""
    pages: list[bytes]
    """For each tensor of the group the contents of these blocks, codes and scales as they are:
    `[layers, blocks, ...]`; none if the piece names another place."""


@dataclass(frozen=True, slots=True)
class PagesPlace:
    """Where the pages of a piece are on the host of the engine that computed them."""

    process_id: int
    descriptor: int
    """Of an open file of the process."""
    nonce: bytes
    """With which the file begins."""
    sizes: list[list[int]]
    """Of the pages that follow, in bytes, by group."""


@dataclass(frozen=True, slots=True)
class PrefixPiece:
    """From the engine, for a request with `exports_prefix`; to the engine, for one with
    `awaits_prefix`. Pieces come in the order of their blocks."""

    request_id: str
    groups: list[GroupPages]
    """One for each KV group; empty: the request gets no more than it has."""
    is_last: bool
    """The request waits no longer."""
    place: PagesPlace | None = None
    """None: the pages are in `groups`."""

    @property
    def transport(self) -> PrefixTransport:
        """By which the pages travel."""
        return PrefixTransport.FRAMES if self.place is None else PrefixTransport.MEMORY

    @property
    def num_bytes(self) -> int:
        """Of its pages."""
        if self.place is not None:
            return sum(map(sum, self.place.sizes))
        return sum(len(page) for group in self.groups for page in group.pages)
