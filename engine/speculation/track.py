"""The statistics of one proposer for one adapter version, or for the base model."""

from __future__ import annotations

from collections.abc import Collection

from ...adapters.identity import AdapterKey
from ..messages import SpeculationStats
from .acceptance import MEMORY, AcceptanceRates
from .probes import ProbeTimes
from .supply import Supply

PROBE_MEMORY = 0.5
"""The factor of earlier drafts' weight at a probe, because they are old."""


class Track:
    acceptance: AcceptanceRates
    supply: Supply

    def __init__(self, max_tokens: int, prior: Track | None = None) -> None:
        """`prior`: the estimate until there are observations."""
        self.acceptance = AcceptanceRates(max_tokens, prior.acceptance if prior else None)
        self.supply = Supply(prior.supply if prior else None)
        self.probe_times = ProbeTimes()
        self.planned = 0
        """The most tokens that were to be drafted for a request when that was last decided."""
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._longest = 1
        """Tokens of a draft."""
        self._last_wish = -1
        self._last_draft = -1

    def gains(self, num_tokens: int) -> list[float]:
        """For each number of draft tokens, the expected number of tokens gained.

        At most twice as many as were ever verified here: a new adapter is assumed to be like the
        others, but does not start with long drafts.
        """
        share, num_tokens = self.supply.share, min(num_tokens, 2 * self._longest)
        return [share * value for value in self.acceptance.probabilities[:num_tokens]]

    def observe_wish(self, step: int, *, has_draft: bool) -> None:
        """In this step a draft was wanted."""
        if step != self._last_wish:
            self._last_wish = step
            self.supply.forget()
        self.supply.observe(has_draft=has_draft)

    def observe(self, step: int, num_tokens: int, accepted: Collection[int]) -> None:
        """In this step a draft was verified; `accepted`: its tokens that were right."""
        is_probe = step == self.probe_times.last_step
        if step != self._last_draft:
            self._last_draft = step
            self.acceptance.forget(PROBE_MEMORY if is_probe else MEMORY)
        self.acceptance.observe(num_tokens, accepted)
        if is_probe and accepted:
            self.probe_times.succeed()
        self._longest = max(self._longest, num_tokens)
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.num_accepted_tokens += len(accepted)

    def stats(self, key: AdapterKey | None, proposer: str) -> SpeculationStats:
        return SpeculationStats(
            key=key,
            proposer=proposer,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            acceptance=self.acceptance.probabilities[0],
            num_tokens=self.planned,
        )
