"""Requests whose answer is one vector for each prompt: embeddings, classifications, scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from ...engine.messages import Pooling
from ...engine.sampling_params import SamplingParams
from ...engine.text.text_form import TextForm
from ...platform.keys.principal import Principal
from ..http.disconnects import unless_disconnected
from ..http.request_context import held_charge
from ..inference.inference import Inference, Running
from ..inference.order import Order
from ..inference.served_models import ServedModel
from ..schemas.prompt_usage import PromptUsage

_NO_OUTPUT = SamplingParams(max_tokens=0)


class Pooled(NamedTuple):
    """The answer."""

    running: Running
    vectors: list[npt.NDArray[np.float32]]
    """In the order of the prompts."""

    @property
    def usage(self) -> PromptUsage:
        num_tokens = self.running.generation.counts.num_prompt_tokens
        return PromptUsage(num_tokens, num_tokens)


class Options(Protocol):
    """The body of such a request."""

    @property
    def priority(self) -> int | None: ...

    @property
    def deadline_ms(self) -> int | None: ...


async def run_pooled(
    request: Request,
    inference: Inference,
    principal: Principal,
    model: ServedModel,
    prompts: Sequence[list[int]],
    options: Options,
    *,
    pooling: Pooling,
    prompt_param: str,
) -> Pooled:
    """Compute the vectors; the request's usage is in the ledger when this returns.

    Raises ApiError, an EngineError or a LimitReached.
    """
    order = Order(
        request_id=request.state.request_id,
        arrived_at=request.state.started_at,
        measures=request.state.measures,
        held_charge=held_charge(request),
        principal=principal,
        model=model,
        prompts=prompts,
        prompt_param=prompt_param,
        num_choices=1,
        priority=options.priority or 0,
        deadline_ms=options.deadline_ms,
        sampling=_NO_OUTPUT,
        text=TextForm(continues_prompt=True),
        pooling=pooling,
    )
    running = await unless_disconnected(request.receive, inference.start(order))
    try:
        whole = await unless_disconnected(request.receive, running.generation.whole())
    finally:
        await running.generation.aclose()
    vectors = [
        next(delta.embedding for delta in deltas if delta.embedding is not None) for deltas in whole
    ]
    return Pooled(running, [np.frombuffer(vector, "<f4") for vector in vectors])
