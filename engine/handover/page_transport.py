"""How pages get from the engine that computed a prefix to the one that decodes. Torch-free."""

from __future__ import annotations

from typing import Protocol

from ...adapters.identity import AdapterKey
from ..messages import PrefixPiece


class PageTransport(Protocol):
    """Both ends of one way. Pieces travel as messages over the links of the fleet in any case; a
    transport decides where their pages are meanwhile."""

    def send(self, piece: PrefixPiece, adapter: AdapterKey | None) -> PrefixPiece:
        """The message to be sent for a piece, which this adapter has computed. The transport may
        leave the pages where they are, in the message."""

    def receive(self, piece: PrefixPiece) -> PrefixPiece:
        """The piece with its pages; without groups if they are not there any more."""

    def forget(self, key: AdapterKey) -> None:
        """Erase the pages on their way that were computed with this adapter."""

    def poll(self) -> bool:
        """Free what was received, and what nobody will receive. Whether more is held."""
        ...

    def close(self) -> None:
        """Free everything."""


class PagesInFrames(PageTransport):
    """Pages travel in the messages."""

    def send(self, piece: PrefixPiece, adapter: AdapterKey | None) -> PrefixPiece:
        """See `PageTransport`."""
        return piece

    def receive(self, piece: PrefixPiece) -> PrefixPiece:
        """See `PageTransport`."""
        return piece

    def forget(self, key: AdapterKey) -> None:
        """See `PageTransport`. Messages cannot be called back: their receivers drop them."""

    def poll(self) -> bool:
        """See `PageTransport`."""
        return False

    def close(self) -> None:
        """See `PageTransport`."""
