"""The prices of a base model's tokens, and what a request costs by them. Exact: no floats."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from .money import MAX_AMOUNT, NANOS

MAX_PRICE = 10**6 * NANOS
"""The highest price of a million tokens."""
_TOKENS = 10**6
_PERCENT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The prices of one model from a time on, of a million tokens each, in 1e-9 of the currency's
    unit."""

    id: int
    base: str
    tenant_id: str | None
    """The only tenant it is for; None: all tenants without prices of their own."""
    prompt: int
    cached: int
    """At most `prompt`."""
    completion: int
    trained: int = 0
    batch_discount: int
    """In percent."""
    is_end: bool = False
    """It only ends the tenant's own prices."""
    effective_from: datetime

    def amount(
        self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int, is_batch: bool
    ) -> int:
        """What these tokens cost, rounded once, half up."""
        cost = self._cost(prompt_tokens, cached_tokens, completion_tokens, is_batch=is_batch)
        whole = _TOKENS * _PERCENT
        return min((2 * cost + whole) // (2 * whole), MAX_AMOUNT)

    def most(self, *, prompt_tokens: int, completion_tokens: int, is_batch: bool) -> int:
        """The most that a request with at most these tokens costs, rounded up."""
        cost = self._cost(prompt_tokens, 0, completion_tokens, is_batch=is_batch)
        return min(-(-cost // (_TOKENS * _PERCENT)), MAX_AMOUNT)

    def _cost(self, prompt: int, cached: int, completion: int, *, is_batch: bool) -> int:
        cost = (prompt - cached) * self.prompt + cached * self.cached + completion * self.completion
        return cost * (_PERCENT - self.batch_discount if is_batch else _PERCENT)


def amount_of_training(price: int, num_tokens: int) -> int:
    """What a fine-tuning job of so many tokens costs at this price of a million, rounded once, half
    up."""
    return min((2 * price * num_tokens + _TOKENS) // (2 * _TOKENS), MAX_AMOUNT)
