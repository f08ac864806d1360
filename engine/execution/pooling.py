"""Pools the last layer's hidden states to one vector per prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..errors import NumericalError
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


def pool(request: Request, states: Tensor) -> bytes | None:
    """Add the next rows that the request reads, `states [num_rows, hidden_size]`.

    Returns their mean over the whole prompt in fp32 once all have arrived; last-token pooling is a
    mean of one. Raises NumericalError if it is not finite.
    """
    total = states.float().sum(0)
    request.pooled = total if request.pooled is None else request.pooled + total
    if len(states) < len(request.unread):
        return None
    is_last = request.submitted.pooling is Pooling.LAST
    vector = request.pooled / (1 if is_last else request.num_prompt_tokens)
    if not vector.isfinite().all():
        raise NumericalError
    embedding: bytes = vector.cpu().numpy().tobytes()
    return embedding
