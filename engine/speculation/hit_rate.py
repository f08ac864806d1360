"""The share of draft requests for which a proposer finds a draft at all."""

from __future__ import annotations

from .acceptance import MEMORY, PRIOR_WEIGHT


class HitRate:
    """The recent share of draft requests whose draft was not empty."""

    def __init__(self, prior: HitRate | None = None) -> None:
        """`prior`: the estimate before there are observations; None: 1."""
        self._num_requests = PRIOR_WEIGHT
        self._num_drafts = PRIOR_WEIGHT * (prior.value if prior else 1.0)

    @property
    def value(self) -> float:
        return self._num_drafts / self._num_requests

    def forget(self, memory: float = MEMORY) -> None:
        """Reduce the weight of past observations."""
        self._num_requests *= memory
        self._num_drafts *= memory

    def observe(self, *, has_draft: bool) -> None:
        self._num_requests += 1
        self._num_drafts += has_draft
