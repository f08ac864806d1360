"""`POST /v1/responses`."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...platform.keys.principal import Principal, Scope
from ..contract.errors import ApiError
from ..contract.promises import answers
from ..formats.answering import SERVED_HEADERS, answer_stream, answer_whole
from ..formats.chat_order import order_chat
from ..formats.generation_errors import GENERATION_ERRORS, GRAMMAR_ERRORS
from ..formats.responses import ResponsesFormat
from ..formats.stored_responses import (
    NOTHING_EARLIER,
    Earlier,
    ResponseRecord,
    continued,
    load_earlier,
)
from ..http.auth import require
from ..http.batch_lines import line_of
from ..http.bodies import INFERENCE_BODY_BYTES, json_body
from ..http.disconnects import unless_disconnected
from ..schemas.answers import Usage
from ..schemas.response_objects import Response as ResponseObject
from ..schemas.response_objects import ResponseEvent
from ..schemas.responses import ResponsesBody
from ..server.runtime import CurrentRuntime, Runtime

router = APIRouter(prefix="/v1")


@router.post("/responses")
@answers(
    ResponseObject,
    stream=ResponseEvent,
    errors=(
        *GENERATION_ERRORS,
        *GRAMMAR_ERRORS,
        *("chat_template_missing", "response_not_found", "conversation_too_large"),
        "quota_exceeded",
    ),
    headers=SERVED_HEADERS,
)
async def create_response(
    request: Request,
    runtime: CurrentRuntime,
    principal: Annotated[Principal, Depends(require(Scope.INFER))],
    body: Annotated[ResponsesBody, Depends(json_body(ResponsesBody, INFERENCE_BODY_BYTES))],
) -> Response:
    """Create a response in the form of OpenAI's Responses API, at once or as a stream of events.

    With `store`, a complete response is stored and can be continued with `previous_response_id`.
    """
    record, earlier = None, await _earlier(runtime, principal, body)
    if body.store:
        record = _open_record(request, runtime, principal, body, earlier)
        await record.check_room()
    inference = runtime.inference
    order, plan = await order_chat(request, inference, principal, continued(body, earlier))
    running = await unless_disconnected(request.receive, inference.start(order))
    form = ResponsesFormat(body, order, plan, inference.tokenizer_of(order.model))

    async def store(usage: Usage) -> None:
        if record is not None:
            await record.store(form.response(usage))

    if body.stream:
        return answer_stream(request, running, form, store)
    return await answer_whole(request, running, form, store)


async def _earlier(runtime: Runtime, principal: Principal, body: ResponsesBody) -> Earlier:
    if body.previous_response_id is None:
        return NOTHING_EARLIER
    return await load_earlier(runtime.control_plane, principal, body.previous_response_id)


def _open_record(
    request: Request,
    runtime: Runtime,
    principal: Principal,
    body: ResponsesBody,
    earlier: Earlier,
) -> ResponseRecord:
    """Raises ApiError for a line of a batch: a repeated attempt would store a second response."""
    if line_of(request) is not None:
        raise ApiError("unsupported_parameter", "store: is not supported in batches", param="store")
    return ResponseRecord(
        runtime.control_plane,
        principal,
        body,
        request_id=request.state.request_id,
        earlier=earlier,
        kept_for=timedelta(days=runtime.settings.response_days),
    )
