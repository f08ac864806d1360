"""How often a proposer has a draft at all."""

from __future__ import annotations

from .acceptance import MEMORY, PRIOR_WEIGHT


class Supply:
    """The share of wishes for a draft that got one which was not empty, lately."""

    def __init__(self, prior: Supply | None = None) -> None:
        """`prior`: the estimate until there are observations; None: there is always a draft."""
        self._num_wanted = PRIOR_WEIGHT
        self._num_drafts = PRIOR_WEIGHT * (prior.share if prior else 1.0)

    @property
    def share(self) -> float:
        return self._num_drafts / self._num_wanted

    def forget(self, memory: float = MEMORY) -> None:
        """Decay the weight of earlier observations."""
        self._num_wanted *= memory
        self._num_drafts *= memory

    def observe(self, *, has_draft: bool) -> None:
        self._num_wanted += 1
        self._num_drafts += has_draft
