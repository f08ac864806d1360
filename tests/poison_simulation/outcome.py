"""What a simulated outbreak did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from loraplex.adapters.identity import AdapterKey


@dataclass(slots=True)
class Outcome:
    """Counts of one run."""

    deaths: Counter[AdapterKey] = field(default_factory=Counter)
    """Engines that each poisonous adapter ended."""
    held_out: set[AdapterKey] = field(default_factory=set)
    """Innocent adapters of which a request was refused by a quarantine."""
    num_answers: int = 0
    """Requests for innocent adapters that were answered."""
    num_refusals: int = 0
    """Requests for poisonous adapters that a quarantine refused or ended."""

    @property
    def most_deaths(self) -> int:
        """Of one adapter."""
        return max(self.deaths.values(), default=0)
