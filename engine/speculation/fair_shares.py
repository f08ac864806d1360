"""Fair division of a proposer's budget in a step among its requests."""

from __future__ import annotations

from collections.abc import Iterable


def fair_shares(needs: Iterable[int], budget: int) -> list[int]:
    """Max-min fair shares of `budget`: no share exceeds its need."""
    needs = list(needs)
    shares = [0] * len(needs)
    for place, index in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        shares[index] = min(needs[index], budget // (len(needs) - place))
        budget -= shares[index]
    return shares
