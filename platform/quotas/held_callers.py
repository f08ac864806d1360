"""The limits of a tenant's users and keys, changed by one unit of work that holds the tenant's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ..errors import TooManyRequestsAtOnce
from ..sessions import TenantRows
from . import repository
from .bucket import Reading
from .holder import Holder, possessive
from .limits import Limits
from .models import RateKind
from .rates import Rates


class HeldCallers:
    """The limits and buckets of the users and keys that the requests of a unit of work have."""

    def __init__(self, session: TenantRows, now: Reading) -> None:
        self._session = session
        self._now = now
        self._limits: dict[Holder, Limits | None] = {}
        self._rates: dict[Holder, Rates] = {}

    def load(self, holders: Iterable[Holder]) -> None:
        """Read the limits of these holders, unless they were read before."""
        unknown = sorted(set(holders) - self._limits.keys())
        if not unknown:
            return
        found = repository.list_caller_limits(self._session, unknown)
        buckets = repository.list_caller_buckets(self._session, list(found)) if found else {}
        for holder in unknown:
            row = found.get(holder)
            self._limits[holder] = limits = None if row is None else Limits(**row)
            if limits is not None:
                whose = possessive(holder)
                self._rates[holder] = Rates(
                    limits, buckets.get(holder, {}), self._now, whose=f"{whose} "
                )

    def check(
        self,
        holders: Iterable[Holder],
        *,
        input_tokens: int,
        output_tokens: int,
        num_running: Callable[[Holder], int],
    ) -> None:
        """Check that one more request fits all limits. Raises RateLimited or
        TooManyRequestsAtOnce."""
        for holder, limits, rates in self._of(holders):
            most = limits.concurrent_requests
            if most is not None and num_running(holder) >= most:
                raise TooManyRequestsAtOnce(
                    f"{possessive(holder).capitalize()} limit is {most} requests at once, and "
                    f"{num_running(holder)} run.",
                    standing=rates.standing,
                )
            rates.check(rates.costs(input_tokens=input_tokens, output_tokens=output_tokens))

    def pay(self, holders: Iterable[Holder], *, input_tokens: int, output_tokens: int) -> None:
        """Take what a request may use."""
        for _, _, rates in self._of(holders):
            rates.pay(rates.costs(input_tokens=input_tokens, output_tokens=output_tokens))

    def refund(
        self,
        holders: Iterable[Holder],
        *,
        reserved: tuple[int, int],
        used: tuple[int, int],
    ) -> None:
        """Return what an ended request took and did not use; both are input and output tokens.

        What it took is known by the present limits: if they were changed meanwhile, the buckets
        differ by less than one request.
        """
        for _, _, rates in self._of(holders):
            paid = rates.costs(input_tokens=reserved[0], output_tokens=reserved[1])
            rates.pay(
                {
                    kind: amount - paid.get(kind, 0)
                    for kind, amount in zip(
                        (RateKind.INPUT_TOKENS, RateKind.OUTPUT_TOKENS), used, strict=True
                    )
                }
            )

    def write(self) -> None:
        """Write the buckets that were charged."""
        changes: Mapping[Holder, Mapping[RateKind, repository.BucketRow]] = {
            holder: changed
            for holder, rates in sorted(self._rates.items())
            if (changed := rates.changes)
        }
        if changes:
            repository.write_caller_buckets(self._session, changes)

    def _of(self, holders: Iterable[Holder]) -> list[tuple[Holder, Limits, Rates]]:
        holders = list(holders)
        self.load(holders)
        return [
            (holder, limits, self._rates[holder])
            for holder in holders
            if (limits := self._limits[holder]) is not None
        ]
