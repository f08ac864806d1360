"""Divides a proposer's time in a step among the requests it drafts for."""

from __future__ import annotations

from collections.abc import Iterable


def fair_shares(needs: Iterable[int], budget: int) -> list[int]:
    """Divide a budget max-min fairly: no share exceeds its need, or falls below another that
    exceeds it."""
    needs = list(needs)
    shares = [0] * len(needs)
    for place, index in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        shares[index] = min(needs[index], budget // (len(needs) - place))
        budget -= shares[index]
    return shares
