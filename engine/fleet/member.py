"""A replica as the database lists it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Member:
    """One row, as it was when it was last read."""

    id: str
    host: str
    port: int
    is_draining: bool
    """Whether an operator wants it to accept no further requests."""
    incarnation: str | None
    """The agent's that served last; None: none ever did."""
    is_live: bool
    """Whether an API server has heard within seconds that it serves."""
    has_expired: bool
    """Whether its agent's lease has ended, so that it holds nothing; also if there was none."""

    @property
    def address(self) -> str:
        """`host:port`, with an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
