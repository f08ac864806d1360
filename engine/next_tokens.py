"""Creates the event with each request's next tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .errors import EngineError
from .execution.execution import Drawn
from .execution.grammars import Grammars
from .execution.runner import StepOutput
from .execution.sampler import logprobs_of
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
        allowed, failed = self._grammars.restrict(requests, logits)
        verified = self._acceptor.accept(requests, allowed)
        kept = _kept_rows(requests, verified)
        logprobs = _logprobs(requests, verified, kept, logits)
        return [
            failed.get(request)
            or Drawn(accepted.path, _event(request, accepted.token_ids, own_rows, entries, logits))
            for request, accepted, own_rows, entries in zip(
                requests, verified, kept, logprobs, strict=True
            )
        ]


def _kept_rows(requests: Sequence[Request], verified: Sequence[Accepted]) -> list[list[int]]:
    """Rows that precede each request's new tokens."""
    rows, start = [], 0
    for request, accepted in zip(requests, verified, strict=True):
        rows.append([start, *(start + 1 + index for index in accepted.path)])
        start += 1 + len(request.draft)
    return rows


def _event(
    request: Request,
    token_ids: list[int],
    rows: list[int],
    logprobs: list[TokenLogprobs] | None,
    logits: Tensor,
) -> TokensGenerated:
    wants_logits = request.submitted.return_logits and request.num_generated_tokens == 0
    raw = logits[rows[0]].cpu().numpy().tobytes() if wants_logits else None
    return TokensGenerated(
        request.request_id,
        token_ids,
        logprobs=logprobs,
        logits=raw,
        num_draft_tokens=len(request.draft),
    )


def _logprobs(
    requests: Sequence[Request],
    verified: Sequence[Accepted],
    rows: Sequence[list[int]],
    logits: Tensor,
) -> list[list[TokenLogprobs] | None]:
    """For each request's new tokens, the requested number of log-probabilities; None if not
    requested."""
    numbers = [request.submitted.sampling.num_logprobs for request in requests]
    asked = [index for index, number in enumerate(numbers) if number is not None]
    if not asked:
        return [None] * len(requests)
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
