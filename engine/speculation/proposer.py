"""The proposer interface. A proposer cannot change the output, only the speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from ...adapters.identity import AdapterKey
from ..draft import Draft
from ..model.layer_features import LayerFeatures
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
    """A proposer for all requests. An exception only costs the step's drafts."""

    @property
    def name(self) -> str:
        """As in configuration, API and metrics: one of `config.PROPOSERS`."""

    @property
    def needs_hidden_states(self) -> bool:
        """Whether `observe` needs them."""

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """A draft for each, empty if there is nothing to propose."""
        ...

    def observe(self, request: Request, hidden_state: Tensor | None) -> None:
        """The request's tokens have grown; `token_ids` are final. Called if the request had a
        draft, and after each step if hidden states are needed.

        `hidden_state [hidden_size]`: the input of the output head when the last token was sampled,
        if requested; None otherwise.
        """

    def forget(self, request_id: str) -> None:
        """The request has ended; unknown ones are ignored."""


@runtime_checkable
class FeatureProposer(Proposer, Protocol):
    """A proposer that reads the hidden states between the base's layers."""

    @property
    def features(self) -> LayerFeatures: ...

    def observe_features(self, request: Request, start: int, features: Tensor) -> None:
        """A step has computed tokens of the request that are final, those from position `start`.

        `features [num_tokens, size]`: theirs, valid until the next step. The token after them is
        known. Called after each step, for those of its requests that are watched.
        """


@runtime_checkable
class OutputProposer(Proposer, Protocol):
    """A proposer that drafts from the finished outputs of other requests.

    Only those of the same adapter version, which belongs to one tenant. `now` is the engine's
    clock, as of `Request.arrival_time`.
    """

    def remember(self, request: Request, now: float) -> None:
        """The output of this request of an adapter is complete, and may be drafted from."""

    def forget_outputs(self, adapter: AdapterKey, now: float) -> None:
        """Drop all that is remembered of an adapter version and its compositions, and remember
        nothing of their requests that are open now."""

    def drop_old_outputs(self, now: float) -> None:
        """Drop what is too old. Called every few seconds."""
