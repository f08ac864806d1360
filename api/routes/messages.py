"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...platform.keys.principal import Principal, Scope
from ..contract.promises import answers
from ..formats.answering import SERVED_HEADERS, answer_stream, answer_whole, usage_of
from ..formats.chat_order import order_chat
from ..formats.generation_errors import GENERATION_ERRORS, GRAMMAR_ERRORS, MODEL_ERRORS
from ..formats.messages import MessagesFormat
from ..http.auth import require
from ..http.bodies import INFERENCE_BODY_BYTES, json_body
from ..http.disconnects import unless_disconnected
from ..http.json_response import json_response
from ..http.request_context import split_key
from ..schemas.anthropic_messages import CountTokensBody, MessagesBody
from ..schemas.message_objects import AnswerMessage, MessageEvent, TokenCount
from ..server.runtime import CurrentRuntime

router = APIRouter(prefix="/v1")

Caller = Annotated[Principal, Depends(require(Scope.INFER))]


@router.post("/messages")
@answers(
    AnswerMessage,
    stream=MessageEvent,
    errors=(*GENERATION_ERRORS, *GRAMMAR_ERRORS, "chat_template_missing"),
    headers=SERVED_HEADERS,
)
async def create_message(
    request: Request,
    runtime: CurrentRuntime,
    principal: Caller,
    body: Annotated[MessagesBody, Depends(json_body(MessagesBody, INFERENCE_BODY_BYTES))],
) -> Response:
    """Create a message in the form of Anthropic's Messages API, at once or as a stream of events.

    The key is a bearer token, or the header `x-api-key`.
    """
    order, plan = await order_chat(request, runtime.inference, principal, body)
    running = await unless_disconnected(request.receive, runtime.inference.start(order))
    form = MessagesFormat(order, plan, usage_of(running.generation.counts))
    if body.stream:
        return answer_stream(request, running, form)
    return await answer_whole(request, running, form)


@router.post("/messages/count_tokens")
@answers(TokenCount, errors=(*MODEL_ERRORS, "chat_template_missing", "invalid_grammar"))
async def count_message_tokens(
    request: Request,
    runtime: CurrentRuntime,
    principal: Caller,
    body: Annotated[CountTokensBody, Depends(json_body(CountTokensBody, INFERENCE_BODY_BYTES))],
) -> Response:
    """Count the tokens of the prompt that a message would have."""
    inference = runtime.inference
    model = await inference.models.resolve(principal, body.model, request_id=split_key(request))
    prompts, use = inference.prompts, body.tool_use
    form = prompts.reasoning.form_with_effort(body.chat_form, body.effort, param=body.effort_param)
    prompt = await prompts.encode_chat(
        principal,
        body.conversation(),
        use.tools if use else (),
        tokenizer=model.own_tokenizer,
        form=form,
        is_bounded=False,
    )
    return json_response(TokenCount(len(prompt)))
