"""All prices of the deployment in memory, to find the one that a request is charged by."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from datetime import datetime

from .price import Price

NO_PRICES: Sequence[Price] = ()


class Tariff:
    """The prices of one base for one tenant, now and at other times."""

    def __init__(self, own: Sequence[Price], common: Sequence[Price]) -> None:
        """Both in the order in which they take effect: those of the tenant alone, which come first,
        and those of all tenants."""
        self._own = own
        self._common = common

    def at(self, moment: datetime) -> Price | None:
        """The price in effect then; None: the tokens are free."""
        own = _latest(self._own, moment)
        if own is not None and not own.is_end:
            return own
        return _latest(self._common, moment)


NO_TARIFF = Tariff(NO_PRICES, NO_PRICES)


class PriceBook:
    """An immutable copy of the table of prices."""

    def __init__(self, prices: Iterable[Price], currency: str | None) -> None:
        """`currency`: None without prices."""
        self.currency = currency
        self.last_id = 0
        """The highest id of a price; 0 without prices."""
        self._prices: dict[tuple[str, str | None], list[Price]] = {}
        for price in sorted(prices, key=lambda price: (price.effective_from, price.id)):
            self._prices.setdefault((price.base, price.tenant_id), []).append(price)
            self.last_id = max(self.last_id, price.id)

    def tariff(self, base: str, tenant_id: str) -> Tariff:
        """This tenant's prices of this base."""
        own, common = ((base, owner) for owner in (tenant_id, None))
        return Tariff(self._prices.get(own, NO_PRICES), self._prices.get(common, NO_PRICES))


NO_BOOK = PriceBook((), None)


def _latest(prices: Sequence[Price], moment: datetime) -> Price | None:
    """The last one that is in effect; of equal times, the one that was set last."""
    index = bisect_right(prices, moment, key=lambda price: price.effective_from)
    return prices[index - 1] if index else None
