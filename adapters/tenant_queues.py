"""Fair queues for a bounded number of workers, one per tenant.

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


class TenantQueues(Generic[Work]):
    """The waiting work, and the number of workers that each tenant occupies."""

    def __init__(self, num_workers: int, *, max_held: int | None = None) -> None:
        """`max_held`: the maximum per tenant; None: only the rule applies."""
        assert num_workers >= 1
        self._num_idle = num_workers
        self._max_held = num_workers if max_held is None else max_held
        self._num_held: Counter[Hashable] = Counter()
        self._queues: dict[Hashable, deque[Work]] = {}
        self._served_at: dict[Hashable, int] = {}
        """The number of its last service, over all tenants; kept while any tenant waits."""
        self._services = count(1)

    def __len__(self) -> int:
        """The number of waiting pieces of work."""
        return sum(map(len, self._queues.values()))

    def add(self, tenant: Hashable, work: Work) -> None:
        """Append the work to the tenant's queue."""
        self._queues.setdefault(tenant, deque()).append(work)

    def take(self) -> tuple[Hashable, Work] | None:
        """The next tenant and its work, which occupies a worker from now on; None if none may
        start.

        Call `end` when the work has ended.
        """
        bound = min(self._num_idle, self._max_held)
        allowed = [each for each in self._queues if self._num_held[each] < bound]
        if not allowed:
            return None
        tenant = min(allowed, key=lambda each: self._served_at.get(each, 0))
        queue = self._queues[tenant]
        work = queue.popleft()
        if not queue:
            del self._queues[tenant]
        self._note_service(tenant)
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
        queue = self._queues.get(tenant)
        if queue is not None and work in queue:
            queue.remove(work)
            if not queue:
                del self._queues[tenant]

    def clear(self) -> list[Work]:
        """Empty all queues; returns the waiting work."""
        queues, self._queues = self._queues, {}
        return [work for queue in queues.values() for work in queue]

    def _note_service(self, tenant: Hashable) -> None:
        if not self._queues:
            self._served_at.clear()
        self._served_at[tenant] = next(self._services)
