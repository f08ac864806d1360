"""`best_of`: the likeliest of a prompt's choices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ..inference.sequence_text import Delta


def best_choices(
    choices: Sequence[Sequence[Delta]], *, num_generated: int, num_returned: int
) -> list[int]:
    """The indices of the choices to return: of the `num_generated` of each prompt the
    `num_returned` with the highest mean log-probability of their tokens, the highest first."""
    indices = range(len(choices))
    if num_returned == num_generated:
        return list(indices)
    prompts = (indices[start : start + num_generated] for start in indices[::num_generated])
    # The sort is stable: of equal choices the first is returned.
    ranked = (
        sorted(prompt, key=lambda index: -_mean_logprob(choices[index])) for prompt in prompts
    )
    return list(chain.from_iterable(prompt[:num_returned] for prompt in ranked))


def _mean_logprob(deltas: Sequence[Delta]) -> float:
    """0 without tokens."""
    logprobs = [entry.chosen.logprob for delta in deltas for entry in delta.logprobs]
    return sum(logprobs) / max(len(logprobs), 1)
