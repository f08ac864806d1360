"""`POST /v1/responses`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...platform.keys.principal import Principal, Scope
from ..contract.promises import answers
from ..formats.answering import SERVED_HEADERS, answer_stream, answer_whole
from ..formats.chat_order import order_chat
from ..formats.generation_errors import GENERATION_ERRORS, GRAMMAR_ERRORS
from ..formats.responses import ResponsesFormat
from ..http.auth import require
from ..http.bodies import INFERENCE_BODY_BYTES, json_body
from ..http.disconnects import unless_disconnected
from ..schemas.response_objects import Response as ResponseObject
from ..schemas.response_objects import ResponseEvent
from ..schemas.responses import ResponsesBody
from ..server.runtime import CurrentRuntime

router = APIRouter(prefix="/v1")


@router.post("/responses")
@answers(
    ResponseObject,
    stream=ResponseEvent,
    errors=(*GENERATION_ERRORS, *GRAMMAR_ERRORS, "chat_template_missing"),
    headers=SERVED_HEADERS,
)
async def create_response(
    request: Request,
    runtime: CurrentRuntime,
    principal: Annotated[Principal, Depends(require(Scope.INFER))],
    body: Annotated[ResponsesBody, Depends(json_body(ResponsesBody, INFERENCE_BODY_BYTES))],
) -> Response:
    """Create a response in the form of OpenAI's Responses API, at once or as a stream of events.

    Responses are not stored: to continue a conversation, send the earlier items again.
    """
    inference = runtime.inference
    order, plan = await order_chat(request, inference, principal, body)
    running = await unless_disconnected(request.receive, inference.start(order))
    form = ResponsesFormat(body, order, plan, inference.tokenizer_of(order.model))
    if body.stream:
        return answer_stream(request, running, form)
    return await answer_whole(request, running, form)
