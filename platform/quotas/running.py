"""What the unsettled requests of a tenant hold, by the users and keys that made them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from .holder import TENANT, Holder, callers_of


class CallerUse(NamedTuple):
    """What the running requests of one user with one key hold."""

    user_id: str | None
    key_id: str | None
    num_requests: int
    amount: int
    """The most that they cost, in 1e-9 of the currency's unit."""


class Running:
    """The sums of each holder, that of the tenant among them."""

    def __init__(self, uses: Iterable[CallerUse]) -> None:
        self._num_requests: Counter[Holder] = Counter()
        self._amounts: Counter[Holder] = Counter()
        for use in uses:
            self.add(use)

    def add(self, use: CallerUse) -> None:
        """Count more requests."""
        for holder in (TENANT, *callers_of(use.user_id, use.key_id)):
            self._num_requests[holder] += use.num_requests
            self._amounts[holder] += use.amount

    def num_requests(self, holder: Holder) -> int:
        """How many requests of the holder run."""
        return self._num_requests[holder]

    def amount(self, holder: Holder) -> int:
        """The most that the holder's running requests cost."""
        return self._amounts[holder]
