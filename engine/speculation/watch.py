"""Whose hidden states are collected for a version: of all requests while it is drafted for, and
otherwise of one request before a probe. Torch-free.

Collecting costs part of each step, also of those that draft nothing.
"""

from __future__ import annotations

LINGER = 64
"""Steps that decode a version for which all of its requests are still watched after drafts were
planned for one. Steps of other versions do not count: one that is seldom asked for must not lose
the prompts of its requests."""
WARM_UP = 16
"""Steps for which a request is watched before it is probed, unless from its beginning, and after:
the next probe may be soon."""


class Watch:
    """The requests of one version that a proposer sees. A new version is watched for a while."""

    def __init__(self, step: int) -> None:
        self.is_open = False
        """Whether a probe is paid for and waits for its request to be ready."""
        self.ready_at = 0
        """The first step in which the chosen request may be probed."""
        self.chosen: str | None = None
        """The id of the request that is watched for a probe."""
        self._all_since = step
        self._num_idle = 0
        """Steps that decoded the version since drafts were last planned for it."""
        self._counted_at = step
        self._chosen_until = step
        self._blocked_since: int | None = None

    @property
    def covers_all(self) -> bool:
        return self._num_idle <= LINGER

    def covers(self, request_id: str, step: int) -> bool:
        """Whether this request is watched in this step."""
        if self.covers_all:
            return True
        is_awaited = self.is_open and not self._is_suspended(step)
        return request_id == self.chosen and (is_awaited or step <= self._chosen_until)

    def is_new(self, step: int) -> bool:
        """Whether this is the first step since which all are watched: of most of them, nothing is
        known yet."""
        return step == self._all_since

    def count(self, step: int, num_steps: int) -> None:
        """So many steps up to this one decode the version. Called again in a step: no effect."""
        if step > self._counted_at:
            self._num_idle += num_steps
            self._counted_at = step

    def keep_all(self, step: int) -> None:
        """Drafts are planned for the version in this step."""
        if not self.covers_all:
            self._all_since = step
        self._num_idle = 0

    def open(self, step: int) -> None:
        """A probe is due and paid for. The request of the last one may still be watched."""
        self.is_open = True
        if step > self._chosen_until:
            self.chosen = None

    def block(self, step: int) -> None:
        """No probe is possible in this step. Nobody is watched for it once this lasts. What was
        paid stays paid."""
        if self._blocked_since is None:
            self._blocked_since = step

    def unblock(self, step: int) -> None:
        """A probe is possible again."""
        if self._is_suspended(step):
            self.chosen = None  # it was not watched meanwhile
        self._blocked_since = None

    def _is_suspended(self, step: int) -> bool:
        return self._blocked_since is not None and step > self._blocked_since + WARM_UP

    def wants_one(self, step: int) -> bool:
        """Whether a request is to be chosen for a probe: also if one does not decode for long."""
        if not self.is_open or self._is_suspended(step):
            return False
        return self.chosen is None or step > self.ready_at + LINGER

    def choose(self, request_id: str, step: int, *, is_from_start: bool) -> None:
        """`is_from_start`: nothing of the request has been generated."""
        self.chosen = request_id
        self.ready_at = step if is_from_start else step + WARM_UP

    def may_probe(self, request_id: str, step: int) -> bool:
        if self.covers_all:
            return True
        return self.covers(request_id, step) and step >= self.ready_at

    def close(self, step: int) -> None:
        """A request was probed."""
        self.is_open = False
        self._chosen_until = step + WARM_UP

    def drop(self, request_id: str) -> None:
        """The request has ended."""
        if request_id == self.chosen:
            self.chosen = None
