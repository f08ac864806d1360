"""Fair queue for a bounded number of workers, with one line per tenant.

The tenant that was served least recently is next. A tenant may start another task only while more
workers are idle than it occupies, so with two or more workers no tenant occupies all of them, and
none occupies more than `max_held`. This class only decides and runs nothing; it is not thread-safe.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

Work = TypeVar("Work")


class TenantLines(Generic[Work]):
    """The waiting work, and the number of workers that each tenant occupies."""

    def __init__(self, num_workers: int, *, max_held: int | None = None) -> None:
        """`max_held`: the maximum per tenant; None: only the rule applies."""
        assert num_workers >= 1
        self._num_idle = num_workers
        self._max_held = num_workers if max_held is None else max_held
        self._num_held: Counter[Hashable] = Counter()
        self._lines: dict[Hashable, deque[Work]] = {}
        self._served_at: dict[Hashable, int] = {}
        """The turn in which a tenant was last served; kept while any tenant waits."""
        self._turns = count(1)

    def __len__(self) -> int:
        """Pieces of work that wait."""
        return sum(map(len, self._lines.values()))

    def add(self, tenant: Hashable, work: Work) -> None:
        """Append the work to the tenant's line."""
        self._lines.setdefault(tenant, deque()).append(work)

    def take(self) -> tuple[Hashable, Work] | None:
        """The next tenant and its work, which occupies a worker from now on; None if none may
        start.

        Call `end` when the work has ended.
        """
        bound = min(self._num_idle, self._max_held)
        allowed = [each for each in self._lines if self._num_held[each] < bound]
        if not allowed:
            return None
        tenant = min(allowed, key=lambda each: self._served_at.get(each, 0))
        line = self._lines[tenant]
        work = line.popleft()
        if not line:
            del self._lines[tenant]
        self._note_turn(tenant)
        self._num_held[tenant] += 1
        self._num_idle -= 1
        return tenant, work

    def end(self, tenant: Hashable) -> None:
        """One of the tenant's workers is idle again."""
        self._num_held[tenant] -= 1
        if not self._num_held[tenant]:
            del self._num_held[tenant]
        self._num_idle += 1

    def remove(self, tenant: Hashable, work: Work) -> None:
        """Remove waiting work; no effect if it does not wait."""
        line = self._lines.get(tenant)
        if line is not None and work in line:
            line.remove(work)
            if not line:
                del self._lines[tenant]

    def clear(self) -> list[Work]:
        """Empty all lines; returns the waiting work."""
        lines, self._lines = self._lines, {}
        return [work for line in lines.values() for work in line]

    def _note_turn(self, tenant: Hashable) -> None:
        if not self._lines:
            self._served_at.clear()
        self._served_at[tenant] = next(self._turns)
