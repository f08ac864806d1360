"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ...engine.messages import TokenLogprob, TokenLogprobs
from ...engine.tokenizer import Tokenizer
from ...platform.keys.principal import Principal, Scope
from ..answering import answer_stream, answer_whole
from ..auth import require
from ..bodies import INFERENCE_BODY_BYTES, json_body
from ..disconnects import unless_disconnected
from ..request_context import split_key
from ..runtime import CurrentRuntime
from ..schemas.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    TopLogprob,
    Usage,
)
from ..schemas.chat import ChatBody
from ..services.inference import Order
from ..services.sequence_text import Delta
from .logprobs import reported

router = APIRouter(prefix="/v1")


@router.post("/chat/completions")
async def create_chat_completion(
    request: Request,
    runtime: CurrentRuntime,
    principal: Annotated[Principal, Depends(require(Scope.INFER))],
    body: Annotated[ChatBody, Depends(json_body(ChatBody, INFERENCE_BODY_BYTES))],
) -> Response:
    inference = runtime.inference
    model = await inference.resolve(principal, body.model, request_id=split_key(request))
    prompt = await inference.encode_chat(
        principal, [message.for_template() for message in body.messages]
    )
    max_tokens = body.output_limit or inference.room_for_output(prompt)
    order = Order(
        request_id=request.state.request_id,
        arrived_at=request.state.started_at,
        measures=request.state.measures,
        principal=principal,
        model=model,
        prompts=[prompt],
        num_choices=body.num_choices,
        priority=body.priority or 0,
        deadline_ms=body.deadline_ms,
        speculation=body.speculation_params,
        sampling=body.sampling(max_tokens=max_tokens, num_logprobs=body.num_logprobs),
        stop=tuple(body.stop or ()),
        continues_prompt=False,
    )
    running = await unless_disconnected(request.receive, inference.start(order))
    form = ChatFormat(order, inference.tokenizer, streams_usage=body.includes_usage)
    if body.stream:
        return answer_stream(request, running, form, includes_usage=body.includes_usage)
    return await answer_whole(request, running, form)


class ChatFormat:
    """Chat completions and their chunks."""

    def __init__(self, order: Order, tokenizer: Tokenizer, *, streams_usage: bool) -> None:
        self._id = f"chatcmpl-{order.request_id}"
        self._created = int(time.time())
        self._model = order.model.name
        self._num_choices = order.num_choices
        self._has_logprobs = order.sampling.num_logprobs is not None
        self._tokenizer = tokenizer
        self._no_usage: UnsetType | None = None if streams_usage else UNSET

    def opening(self) -> Iterator[ChatChunk]:
        for index in range(self._num_choices):
            yield self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))

    def chunk(self, delta: Delta) -> ChatChunk | None:
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return None
        content = ChatDelta(content=delta.text) if delta.text or delta.logprobs else ChatDelta()
        choice = ChatChunkChoice(delta.index, content, delta.finish_reason, self._logprobs([delta]))
        return self._chunk(choice)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(self._id, self._created, self._model, [], usage)

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> ChatCompletion:
        answers = [
            ChatChoice(
                index,
                ChatMessage("".join(delta.text for delta in deltas)),
                deltas[-1].finish_reason or "stop",
                self._logprobs(deltas),
            )
            for index, deltas in enumerate(choices)
        ]
        return ChatCompletion(self._id, self._created, self._model, answers, usage)

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(self._id, self._created, self._model, [choice], self._no_usage)

    def _logprobs(self, deltas: Sequence[Delta]) -> ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        return ChatLogprobs([self._logprob(entry) for delta in deltas for entry in delta.logprobs])

    def _logprob(self, entry: TokenLogprobs) -> ChatLogprob:
        chosen = self._top(entry.chosen)
        top = [self._top(candidate) for candidate in entry.top]
        return ChatLogprob(chosen.token, chosen.logprob, chosen.bytes, top)

    def _top(self, candidate: TokenLogprob) -> TopLogprob:
        spelled = self._tokenizer.token_bytes(candidate.token_id)
        text = spelled.decode(errors="replace")
        return TopLogprob(text, reported(candidate.logprob), list(spelled))
