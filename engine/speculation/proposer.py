"""The proposer interface. A proposer cannot change the output, only the speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ..draft import Draft
from ..request import Request


class DraftRequest(NamedTuple):
    """A request for which tokens are to be drafted.

    All its tokens but the last are computed, and its blocks are writable for `num_tokens` positions
    after the last one.
    """

    request: Request
    num_tokens: int
    """The maximum that the step has room for; 1 or more."""


class Proposer(Protocol):
    """One way of drafting, for all requests. An exception costs the step's drafts, nothing else."""

    @property
    def name(self) -> str:
        """As in configuration, API and metrics: one of `config.PROPOSERS`."""

    @property
    def needs_hidden_states(self) -> bool:
        """Whether `observe` is to get them."""

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """A draft for each, empty where there is nothing to propose by."""
        ...

    def observe(self, request: Request, hidden_state: Tensor | None) -> None:
        """The request's tokens have grown; `token_ids` are final.

        `hidden_state [hidden_size]`: what the output head met when it drew the last of them, where
        it was asked for; None otherwise.
        """

    def forget(self, request_id: str) -> None:
        """The request has ended; unknown ones are ignored."""
