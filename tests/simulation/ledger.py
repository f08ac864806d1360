"""The simulation's own record of each request, its tenant and its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.request import Request

from .violation import Invariant, require

ALWAYS_LEGITIMATE = frozenset({"length", "stop"})
LOAD_ERROR_CODES = frozenset({"adapter_load_failed", "adapter_too_large", "adapter_deleted"})


@dataclass
class Order:
    """One request as its caller sees it."""

    submitted: GenerationRequest
    request: Request
    allowed: set[str] = field(default_factory=set)
    """Ends other than success that something which happened explains."""
    ended: str | None = None
    was_restarted: bool = False


class Ledger:
    """Every order; `live` are those that have not ended."""

    def __init__(self) -> None:
        self.live: dict[str, Order] = {}
        self.num_ends: Counter[str] = Counter()
        self.troubled: set[AdapterKey] = set()
        """Adapters of which a load failed or that were deleted at least once."""
        self._ended: set[str] = set()

    def open(self, submitted: GenerationRequest, request: Request) -> Order:
        order = self.live[submitted.request_id] = Order(submitted, request)
        return order

    def end(self, request: Request, reason: str) -> Order:
        """Record an end that something explains. Raises Violation for one that nothing does."""
        name = request.request_id
        require(name not in self._ended, Invariant.ONE_END, f"{name} ends again: {reason}")
        order = self.live.pop(name, None)
        require(order is not None, Invariant.ONE_END, f"{name} was never asked for")
        assert order is not None
        self._ended.add(name)
        order.ended = reason
        self.num_ends[reason] += 1
        require(
            self._explains(order, reason),
            Invariant.ONE_END,
            f"{name} ended with {reason}, which nothing explains",
        )
        self._check_success(order, reason)
        return order

    def refuse(self, submitted: GenerationRequest, reason: str) -> None:
        """It never entered the engine."""
        self._ended.add(submitted.request_id)
        self.num_ends[f"refused:{reason}"] += 1

    def allow(self, request_ids: Iterable[str], reason: str) -> None:
        """This may end these requests from now on."""
        for name in request_ids:
            self.live[name].allowed.add(reason)

    def _explains(self, order: Order, reason: str) -> bool:
        if reason in ALWAYS_LEGITIMATE or reason in order.allowed:
            return True
        return reason in LOAD_ERROR_CODES and order.submitted.adapter in self.troubled

    def _check_success(self, order: Order, reason: str) -> None:
        generated = order.request.num_generated_tokens
        limit = order.submitted.sampling.max_tokens
        if reason == "length":
            require(generated == limit, Invariant.ONE_END, f"{generated} of {limit} tokens")
        if reason == "stop":
            require(0 < generated <= limit, Invariant.ONE_END, f"{generated} of {limit} tokens")
