"""Pools the last layer's hidden states to one vector per prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..errors import NotAClassifier, NumericalError
from ..messages import Pooling
from ..request import Request


@contextmanager
def last_hidden_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collects `[num_tokens, hidden_size]` for each forward pass inside: the decoder's result
    before the output head and after the final norm, which transformers calls
    `last_hidden_state`."""
    seen: list[Tensor] = []

    def collect(_module: Any, _args: Any, output: Any) -> None:
        seen.append(output[0][0])

    hook = model.get_decoder().register_forward_hook(collect)
    try:
        yield seen
    finally:
        hook.remove()


def pool(request: Request, states: Tensor, head: Tensor | None = None) -> bytes | None:
    """Add the next rows that the request reads, `states [num_rows, hidden_size]`.

    Returns their mean over the whole prompt in fp32 once all have arrived; last-token pooling is a
    mean of one, and a classification is the product of `head [labels, hidden_size]`, that of the
    request's adapter, with it. Raises NumericalError if the result is not finite, NotAClassifier if
    the head is missing.
    """
    total = states.float().sum(0)
    request.pooled = total if request.pooled is None else request.pooled + total
    if len(states) < len(request.unread):
        return None
    pooling = request.submitted.pooling
    vector = request.pooled / (request.num_prompt_tokens if pooling is Pooling.MEAN else 1)
    if pooling is Pooling.CLASSIFY:
        if head is None:
            raise NotAClassifier
        vector = head.float() @ vector
    if not vector.isfinite().all():
        raise NumericalError
    pooled: bytes = vector.cpu().numpy().tobytes()
    return pooled
