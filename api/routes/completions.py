"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Annotated

from fastapi import APIRouter, Depends
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ...engine.tokenizer import Tokenizer
from ...platform.keys.principal import Principal, Scope
from ..answering import PlainEvents, answer_stream, answer_whole
from ..auth import require
from ..bodies import INFERENCE_BODY_BYTES, json_body
from ..disconnects import unless_disconnected
from ..request_context import split_key
from ..runtime import CurrentRuntime
from ..schemas.answers import Completion, CompletionChoice, CompletionLogprobs, Usage
from ..schemas.completions import CompletionBody
from ..services.inference import Order
from ..services.sequence_text import Delta
from .logprobs import reported

router = APIRouter(prefix="/v1")


@router.post("/completions")
async def create_completion(
    request: Request,
    runtime: CurrentRuntime,
    principal: Annotated[Principal, Depends(require(Scope.INFER))],
    body: Annotated[CompletionBody, Depends(json_body(CompletionBody, INFERENCE_BODY_BYTES))],
) -> Response:
    inference = runtime.inference
    model = await inference.resolve(principal, body.model, request_id=split_key(request))
    prompts = [await inference.encode(prompt) for prompt in body.prompt]
    order = Order(
        request_id=request.state.request_id,
        arrived_at=request.state.started_at,
        measures=request.state.measures,
        principal=principal,
        model=model,
        prompts=prompts,
        num_choices=body.num_choices,
        priority=body.priority or 0,
        deadline_ms=body.deadline_ms,
        speculation=body.speculation_params,
        sampling=body.sampling(
            max_tokens=body.output_limit, num_logprobs=body.logprobs, grammar=body.form_grammar
        ),
        stop=tuple(body.stop or ()),
        continues_prompt=True,
    )
    running = await unless_disconnected(request.receive, inference.start(order))
    form = CompletionFormat(order, inference.tokenizer, streams_usage=body.includes_usage)
    if body.stream:
        return answer_stream(request, running, form)
    return await answer_whole(request, running, form)


class CompletionFormat(PlainEvents):
    """Plain completions; a chunk has the form of a whole answer."""

    def __init__(self, order: Order, tokenizer: Tokenizer, *, streams_usage: bool) -> None:
        self._id = f"cmpl-{order.request_id}"
        self._created = int(time.time())
        self._model = order.model.name
        self._has_logprobs = order.sampling.num_logprobs is not None
        self._tokenizer = tokenizer
        self._streams_usage = streams_usage
        self._offsets = [0] * (len(order.prompts) * order.num_choices)
        """Per choice, where its next token begins in its text."""

    def opening(self) -> Iterator[Completion]:
        return iter(())

    def chunks(self, delta: Delta) -> Iterator[Completion]:
        if delta.text or delta.logprobs or delta.finish_reason:
            no_usage = None if self._streams_usage else UNSET
            yield self._answer([self._choice(delta.index, [delta])], no_usage)

    def closing(self, usage: Usage) -> Iterator[Completion]:
        if self._streams_usage:
            yield self._answer([], usage)

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> Completion:
        return self._answer(
            [self._choice(index, deltas) for index, deltas in enumerate(choices)], usage
        )

    def _answer(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(self._id, self._created, self._model, choices, usage)

    def _choice(self, index: int, deltas: Sequence[Delta]) -> CompletionChoice:
        text = "".join(delta.text for delta in deltas)
        return CompletionChoice(
            index, text, deltas[-1].finish_reason, self._logprobs(index, deltas)
        )

    def _logprobs(self, index: int, deltas: Sequence[Delta]) -> CompletionLogprobs | None:
        if not self._has_logprobs:
            return None
        entries = [entry for delta in deltas for entry in delta.logprobs]
        tokens = [self._tokenizer.token_text(entry.chosen.token_id) for entry in entries]
        *offsets, self._offsets[index] = accumulate(map(len, tokens), initial=self._offsets[index])
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[reported(entry.chosen.logprob) for entry in entries],
            top_logprobs=[
                {
                    self._tokenizer.token_text(top.token_id): reported(top.logprob)
                    for top in entry.top
                }
                for entry in entries
            ],
            text_offset=offsets,
        )
