"""Divides a proposer's time in a step among the requests it drafts for."""

from __future__ import annotations

from collections.abc import Iterable


def fair_shares(needs: Iterable[int], budget: int) -> list[int]:
    """Divide a budget: nobody gets more than needed, or less than another beyond its own need."""
    needs = list(needs)
    shares = [0] * len(needs)
    for place, index in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        shares[index] = min(needs[index], budget // (len(needs) - place))
        budget -= shares[index]
    return shares
