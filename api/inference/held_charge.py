"""A charge that waits for the result of its request: both are committed together.

For the lines of a batch. A line that is interrupted is answered again from the beginning, and only
the attempt whose result is kept is charged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .ledger_writer import Charge

if TYPE_CHECKING:
    from .metering import Account


@dataclass(eq=False, slots=True)
class HeldCharge:
    """The account of one attempt at a line; empty if it was refused before one was opened."""

    account: Account | None = None
    charge: Charge | None = None
    """None: the request has not ended, or it was refused before it ran."""
