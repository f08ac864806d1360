"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...platform.keys.principal import Principal, Scope
from ..contract.promises import answers
from ..formats.answering import SERVED_HEADERS, answer_stream, answer_whole
from ..formats.chat import ChatFormat
from ..formats.chat_order import order_chat
from ..formats.generation_errors import GENERATION_ERRORS, GRAMMAR_ERRORS
from ..http.auth import require
from ..http.bodies import INFERENCE_BODY_BYTES, json_body
from ..http.disconnects import unless_disconnected
from ..schemas.answers import ChatChunk, ChatCompletion
from ..schemas.chat import ChatBody
from ..server.runtime import CurrentRuntime

router = APIRouter(prefix="/v1")


@router.post("/chat/completions")
@answers(
    ChatCompletion,
    stream=ChatChunk,
    errors=(*GENERATION_ERRORS, *GRAMMAR_ERRORS, "chat_template_missing"),
    headers=SERVED_HEADERS,
)
async def create_chat_completion(
    request: Request,
    runtime: CurrentRuntime,
    principal: Annotated[Principal, Depends(require(Scope.INFER))],
    body: Annotated[ChatBody, Depends(json_body(ChatBody, INFERENCE_BODY_BYTES))],
) -> Response:
    """Create a chat completion, as one response or as a stream of events."""
    inference = runtime.inference
    order, plan = await order_chat(request, inference, principal, body)
    running = await unless_disconnected(request.receive, inference.start(order))
    form = ChatFormat(
        order, plan, inference.tokenizer_of(order.model), streams_usage=body.includes_usage
    )
    if body.stream:
        return answer_stream(request, running, form)
    return await answer_whole(request, running, form)
