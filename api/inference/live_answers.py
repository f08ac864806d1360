"""A sample of the requests that aliases with shadows or judged canaries have answered, in memory
only."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Generic, NamedTuple, TypeVar

import prometheus_client

from ...platform.adapters.canary import request_place
from ...platform.adapters.registry import AdapterRef, Rival, Shadow
from ..telemetry.metrics import Metrics
from .order import Order

MAX_WAITING = 64
"""In each queue. Texts of tenants, so not many."""
MAX_WAITING_OF_TENANT = 48
"""In each queue: no tenant alone fills it."""

Other = TypeVar("Other", Shadow, Rival)
"""What is to answer a copy."""


class LiveAnswer(NamedTuple, Generic[Other]):
    """What a caller ordered, and what it got."""

    order: Order
    other: Other
    text: str
    num_tokens: int


class AnswerQueue(Generic[Other]):
    """Answers that wait for another one to the same request."""

    def __init__(self, outcomes: prometheus_client.Counter) -> None:
        self._outcomes = outcomes
        self._waiting: asyncio.Queue[LiveAnswer[Other]] = asyncio.Queue(MAX_WAITING)
        self._num_of_tenant: Counter[str] = Counter()

    def offer(self, answer: LiveAnswer[Other]) -> None:
        """Add an answer; if too many wait, of all tenants or of its own, it is dropped and
        counted."""
        tenant_id = answer.order.principal.tenant_id
        if self._waiting.full() or self._num_of_tenant[tenant_id] >= MAX_WAITING_OF_TENANT:
            self._outcomes.labels("dropped").inc()
            return
        self._num_of_tenant[tenant_id] += 1
        self._waiting.put_nowait(answer)

    async def take(self) -> LiveAnswer[Other]:
        """The next answer, once there is one."""
        answer = await self._waiting.get()
        self._num_of_tenant -= Counter([answer.order.principal.tenant_id])
        return answer


class LiveAnswers:
    """The queues of a server."""

    def __init__(self, metrics: Metrics) -> None:
        self.shadowed: AnswerQueue[Shadow] = AnswerQueue(metrics.shadow_requests)
        self.judged: AnswerQueue[Rival] = AnswerQueue(metrics.canary_comparisons)


def shadow_of(order: Order) -> Shadow | None:
    """The shadow that is to answer a copy of the order; None: none."""
    shadow = None if order.model.adapter is None else order.model.adapter.shadow
    if shadow is None or not _can_copy(order, shadow.version):
        return None
    return shadow if _place("shadow", order) < shadow.percent else None


def rival_of(order: Order) -> Rival | None:
    """The version whose answer a judge is to compare with the order's; None: none. Orders with
    `store: false` are not judged."""
    rival = None if order.model.adapter is None else order.model.adapter.rival
    if rival is None or order.is_private or not _can_copy(order, rival.version):
        return None
    return rival if _place("judge", order) < rival.percent else None


def _can_copy(order: Order, version: AdapterRef) -> bool:
    """Another version can answer a copy of the order.

    Not of lines of batches, compositions, several choices or prompts, and vectors, nor if the two
    versions have different tokens.
    """
    adapter = order.model.adapter
    if adapter is None or order.model.composition is not None:
        return False
    if version.added_tokens != adapter.added_tokens:
        return False
    return order.held_charge is None and order.pooling is None and order.num_sequences == 1


def _place(purpose: str, order: Order) -> float:
    """The order's value among those of its alias, uniform in [0, 100)."""
    adapter = order.model.adapter
    assert adapter is not None, "the base has no aliases"
    return request_place(adapter.adapter_id, f"{purpose} of {adapter.alias}", order.request_id)
