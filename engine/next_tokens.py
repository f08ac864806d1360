"""Creates the event with each request's next tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .draft import NO_DRAFT
from .errors import EngineError
from .execution.execution import Drawn
from .execution.grammars import Grammars
from .execution.runner import StepOutput
from .execution.sampler import logprobs_of, row_after, sample
from .messages import TokenLogprobs, TokensGenerated
from .request import Request
from .speculation.acceptors import Accepted, Acceptor


class NextTokens:
    """Draws tokens under the requests' grammars and verifies drafts with an acceptor."""

    def __init__(self, acceptor: Acceptor, grammars: Grammars) -> None:
        self._acceptor = acceptor
        self._grammars = grammars

    def draw(
        self, requests: Sequence[Request], output: StepOutput, rows: Sequence[int]
    ) -> list[Drawn | EngineError]:
        """Verify each request's draft and sample the token after the accepted ones; see
        `execution.Draw`.

        Log-probabilities are the model's own, regardless of the grammar.
        """
        logits = output.logits
        if len(rows) < len(logits):  # a copy, and a wait for the device
            logits = logits[rows]
        allowed: Tensor = logits
        failed: Mapping[Request, EngineError] = {}
        if any(request.matcher is not None for request in requests):
            allowed, failed = self._grammars.restrict(requests, logits)
        if any(request.draft is not NO_DRAFT for request in requests):
            verified = self._acceptor.accept(requests, allowed)
        else:
            tokens = sample(allowed, list(map(row_after, requests)))
            verified = [Accepted([], [token]) for token in tokens]
        logprobs: Sequence[list[TokenLogprobs] | None] = [None] * len(requests)
        if any(request.submitted.sampling.num_logprobs is not None for request in requests):
            logprobs = _logprobs(requests, verified, logits)
        drawn: list[Drawn | EngineError] = []
        row = 0
        for request, accepted, entries in zip(requests, verified, logprobs, strict=True):
            generated = _event(request, accepted.token_ids, entries, logits, row)
            drawn.append(failed.get(request) or Drawn(accepted.path, generated))
            row += 1 + len(request.draft.token_ids)
        return drawn


def _event(
    request: Request,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
    logits: Tensor,
    row: int,
) -> TokensGenerated:
    """`row`: the one of its last known token."""
    wants_logits = request.submitted.return_logits and request.num_generated_tokens == 0
    return TokensGenerated(
        request.request_id,
        token_ids,
        logprobs=logprobs,
        logits=logits[row].cpu().numpy().tobytes() if wants_logits else None,
        num_draft_tokens=len(request.draft.token_ids),
    )


def _logprobs(
    requests: Sequence[Request],
    verified: Sequence[Accepted],
    logits: Tensor,
) -> list[list[TokenLogprobs] | None]:
    """For each request's new tokens, the requested number of log-probabilities; None if not
    requested. At least one request asks for some."""
    numbers = [request.submitted.sampling.num_logprobs for request in requests]
    asked = [index for index, number in enumerate(numbers) if number is not None]
    rows = _kept_rows(requests, verified)
    entries = iter(
        logprobs_of(
            logits[[row for index in asked for row in rows[index]]],
            [token for index in asked for token in verified[index].token_ids],
            max(numbers[index] or 0 for index in asked),
        )
    )
    found: list[list[TokenLogprobs] | None] = [None] * len(requests)
    for index in asked:
        own = [next(entries) for _ in rows[index]]
        found[index] = [TokenLogprobs(entry.chosen, entry.top[: numbers[index]]) for entry in own]
    return found


def _kept_rows(requests: Sequence[Request], verified: Sequence[Accepted]) -> list[list[int]]:
    """Rows that precede each request's new tokens."""
    rows, start = [], 0
    for request, accepted in zip(requests, verified, strict=True):
        rows.append([start, *(start + 1 + index for index in accepted.path)])
        start += 1 + len(request.draft.token_ids)
    return rows
