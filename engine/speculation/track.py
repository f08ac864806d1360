"""Statistics and estimates of one proposer for one adapter version, or for the base."""

from __future__ import annotations

from collections.abc import Collection

from ...adapters.identity import AdapterKey
from ..messages import SpeculationStats
from .acceptance import MEMORY, AcceptanceRates
from .hit_rate import HitRate
from .probes import ProbeTimes
from .watch import Watch

PROBE_MEMORY = 0.5
"""Factor on the weight of older drafts when a probe is observed."""


class Track:
    """One proposer's acceptance, hit rate and probe times for one adapter version."""

    acceptance: AcceptanceRates
    hit_rate: HitRate

    def __init__(self, max_tokens: int, prior: Track | None = None, *, step: int = 0) -> None:
        """`prior`: the estimates before there are observations. `step`: the current one."""
        self.acceptance = AcceptanceRates(max_tokens, prior.acceptance if prior else None)
        self.hit_rate = HitRate(prior.hit_rate if prior else None)
        self.probe_times = ProbeTimes()
        self.watch = Watch(step)
        """Only of a proposer that reads hidden states."""
        self.planned = 0
        """Most draft tokens of one request in the last plan."""
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._longest = 1
        """Length of the longest draft so far."""
        self._last_request = -1
        self._last_draft = -1

    def gains(self, num_tokens: int) -> list[float]:
        """Expected accepted tokens of each of the first `num_tokens` draft tokens.

        At most twice as many as the longest draft so far: a new adapter starts with the estimates
        of all others, but with short drafts.
        """
        share, num_tokens = self.hit_rate.value, min(num_tokens, 2 * self._longest)
        return [share * value for value in self.acceptance.probabilities[:num_tokens]]

    def observe_request(self, step: int, *, has_draft: bool) -> None:
        """A draft was requested in this step."""
        if step != self._last_request:
            self._last_request = step
            self.hit_rate.forget()
        self.hit_rate.observe(has_draft=has_draft)

    def observe(self, step: int, num_tokens: int, accepted: Collection[int]) -> None:
        """A draft was verified in this step; `accepted`: positions of its accepted tokens."""
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
