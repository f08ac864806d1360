"""Creates the event with each request's next tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .draft import NO_DRAFT
from .errors import EngineError
from .execution.execution import Drawn
from .execution.grammars import Grammars
from .execution.runner import StepOutput
from .execution.sampler import LogprobsCopy, row_after, sample_tokens
from .messages import TokenLogprobs, TokensGenerated
from .request import Request
from .speculation.acceptors import Accepted, Acceptor
from .transfers import HostCopy, to_device


class NextTokens:
    """Draws tokens under the requests' grammars and verifies drafts with an acceptor."""

    def __init__(self, acceptor: Acceptor, grammars: Grammars) -> None:
        self._acceptor = acceptor
        self._grammars = grammars

    def draw(self, requests: Sequence[Request], output: StepOutput, rows: Sequence[int]) -> Draws:
        """Begin to verify each request's draft and to sample the token after the accepted ones; see
        `execution.Draw`.

        Only the verification of drafts waits for the device. Log-probabilities are the model's own,
        regardless of the grammar.
        """
        logits = output.logits
        if len(rows) < len(logits):
            logits = logits[to_device(rows, logits.device)]
        allowed: Tensor = logits
        failed: Mapping[Request, EngineError] = {}
        if any(request.matcher is not None for request in requests):
            allowed, failed = self._grammars.restrict(requests, logits)
        if any(request.draft is not NO_DRAFT for request in requests):
            verified = self._acceptor.accept(requests, allowed)
            return Draws(requests, failed, logits, verified)
        return Draws(
            requests, failed, logits, sample_tokens(allowed, list(map(row_after, requests)))
        )


class Draws:
    """The next tokens of some requests, on their way to the host."""

    tokens: Tensor | None
    """int64 `[len(requests)]` on the device: each one's next token; None if drafts were verified.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        failed: Mapping[Request, EngineError],
        logits: Tensor,
        found: Sequence[Accepted] | Tensor,
    ) -> None:
        """failed: the requests whose result is an error. logits: for each request the row of its
        last known token, then one for each of its draft tokens. found: the verified drafts, or
        each request's next token."""
        self._requests = requests
        self._failed = failed
        self._verified: Sequence[Accepted] | None = None
        if isinstance(found, Tensor):
            self.tokens = found
            self._host_tokens = HostCopy(found)
        else:
            self.tokens, self._verified = None, found
        self._num_logprobs = [each.submitted.sampling.num_logprobs for each in requests]
        self._logprobs: LogprobsCopy | None = None
        if any(number is not None for number in self._num_logprobs):
            self._logprobs = self._copy_logprobs(logits)
        self._first_logits: Mapping[Request, HostCopy] = {}
        if any(request.submitted.return_logits for request in requests):
            self._first_logits = _copy_first(requests, logits)

    def read(self) -> list[Drawn | EngineError]:
        """The result of each request; waits for the device."""
        verified = self._verified
        if verified is None:
            verified = [Accepted([], [token]) for token in self._host_tokens.read().tolist()]
        if self._logprobs is None:
            entries: Sequence[list[TokenLogprobs] | None] = [None] * len(self._requests)
        else:
            entries = self._read_logprobs(self._logprobs, verified)
        return [
            self._failed.get(request) or Drawn(accepted.path, self._event(request, accepted, own))
            for request, accepted, own in zip(self._requests, verified, entries, strict=True)
        ]

    def _event(
        self, request: Request, accepted: Accepted, logprobs: list[TokenLogprobs] | None
    ) -> TokensGenerated:
        logits = self._first_logits.get(request)
        return TokensGenerated(
            request.request_id,
            accepted.token_ids,
            logprobs=logprobs,
            logits=logits.read().numpy().tobytes() if logits else None,
            num_draft_tokens=len(request.draft.token_ids),
        )

    def _copy_logprobs(self, logits: Tensor) -> LogprobsCopy:
        """Of the new tokens of the requests that ask for some, at least one."""
        asking = [index for index, number in enumerate(self._num_logprobs) if number is not None]
        if self._verified is None:
            assert self.tokens is not None
            rows = to_device(asking, logits.device)
            tokens = self.tokens[rows]
        else:
            before = _rows_before(self._requests, self._verified)
            rows = to_device([row for index in asking for row in before[index]], logits.device)
            new = [token for index in asking for token in self._verified[index].token_ids]
            tokens = to_device(new, logits.device)
        return LogprobsCopy(logits[rows], tokens, max(self._num_logprobs[i] or 0 for i in asking))

    def _read_logprobs(
        self, copy: LogprobsCopy, verified: Sequence[Accepted]
    ) -> list[list[TokenLogprobs] | None]:
        """For each request's new tokens as many as it asks for; None if it does not."""
        entries = iter(copy.read())
        found: list[list[TokenLogprobs] | None] = []
        for number, accepted in zip(self._num_logprobs, verified, strict=True):
            if number is None:
                found.append(None)
                continue
            own = [next(entries) for _ in accepted.token_ids]
            found.append([TokenLogprobs(entry.chosen, entry.top[:number]) for entry in own])
        return found


def _copy_first(requests: Sequence[Request], logits: Tensor) -> Mapping[Request, HostCopy]:
    """The logits of the first token of the requests that ask for them."""
    return {
        request: HostCopy(logits[start])
        for request, start in zip(requests, _starts(requests), strict=True)
        if request.submitted.return_logits and request.num_generated_tokens == 0
    }


def _starts(requests: Sequence[Request]) -> list[int]:
    """The row of each request's last known token."""
    starts, start = [], 0
    for request in requests:
        starts.append(start)
        start += 1 + len(request.draft.token_ids)
    return starts


def _rows_before(requests: Sequence[Request], verified: Sequence[Accepted]) -> list[list[int]]:
    """The rows from which each request's new tokens follow."""
    return [
        [start, *(start + 1 + index for index in accepted.path)]
        for start, accepted in zip(_starts(requests), verified, strict=True)
    ]
