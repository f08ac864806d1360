"""How many tokens' keys and values a request keeps in the cache. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .errors import InvalidParameter

SNAPKV_WINDOW = 32
"""The last tokens of a prompt, whose attention decides what SnapKV keeps. They are kept too."""
MAX_BUDGET = 1 << 31


class EvictionMethod(StrEnum):
    """Which tokens stay in the cache: those that received the most attention, and the last ones."""

    SNAPKV = "snapkv"
    """The prompt is compressed once, when it is complete (Li et al. 2024). The output stays."""
    H2O = "h2o"
    """The cache is cut to the budget again and again, output included (Zhang et al. 2023)."""

    @property
    def min_budget(self) -> int:
        """Room for one token besides those that are kept as the last ones."""
        return SNAPKV_WINDOW + 1 if self is EvictionMethod.SNAPKV else 2


@dataclass(frozen=True, slots=True)
class KvPolicy:
    """Eviction by attention: every layer and KV head keeps `budget` tokens, each its own.

    Raises InvalidParameter on construction if the budget is out of range.
    """

    method: EvictionMethod
    budget: int
    """Tokens."""

    def __post_init__(self) -> None:
        least = self.method.min_budget
        if not least <= self.budget <= MAX_BUDGET:
            raise InvalidParameter(
                "kv_policy.budget", f"must be from {least} to {MAX_BUDGET} with {self.method}"
            )


def parse_kv_policy(text: str) -> KvPolicy:
    """`METHOD:BUDGET`, as in `snapkv:1024`. Raises InvalidParameter."""
    name, _, budget = text.partition(":")
    if name not in set(EvictionMethod) or not budget.isdecimal():
        methods = " or ".join(f"{method}:TOKENS" for method in EvictionMethod)
        raise InvalidParameter("kv_policy", f"{text} is not {methods}")
    return KvPolicy(EvictionMethod(name), int(budget))
