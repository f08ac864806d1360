"""`POST /v1/responses`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...platform.keys.principal import Principal, Scope
from ..answering import SERVED_HEADERS, answer_stream, answer_whole
from ..auth import require
from ..bodies import INFERENCE_BODY_BYTES, json_body
from ..contract import answers
from ..disconnects import unless_disconnected
from ..formats.responses import ResponsesFormat
from ..request_context import split_key
from ..runtime import CurrentRuntime
from ..schemas.response_objects import Response as ResponseObject
from ..schemas.response_objects import ResponseEvent
from ..schemas.responses import ResponsesBody
from ..services.inference import Order
from .generation_errors import GENERATION_ERRORS, GRAMMAR_ERRORS

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
    """Answer in the form of OpenAI's Responses API, whole or as a stream of events.

    Responses are not kept: whoever goes on sends the items before.
    """
    inference = runtime.inference
    model = await inference.resolve(principal, body.model, request_id=split_key(request))
    use = body.tool_use
    plan = inference.plan_answer(
        use, form_grammar=body.form_grammar, answer_schema=body.answer_schema
    )
    prompt = await inference.encode_chat(principal, body.conversation(), use.tools if use else ())
    max_tokens = body.max_output_tokens or inference.room_for_output(prompt)
    order = Order(
        request_id=request.state.request_id,
        arrived_at=request.state.started_at,
        measures=request.state.measures,
        principal=principal,
        model=model,
        prompts=[prompt],
        num_choices=1,
        priority=body.priority or 0,
        deadline_ms=body.deadline_ms,
        speculation=body.speculation_params,
        sampling=body.sampling(
            max_tokens=max_tokens, num_logprobs=body.num_logprobs, grammar=plan.grammar
        ),
        stop=tuple(body.stop or ()),
        continues_prompt=False,
        visible_token_ids=plan.visible_token_ids,
    )
    running = await unless_disconnected(request.receive, inference.start(order))
    form = ResponsesFormat(body, order, plan, inference.tokenizer)
    if body.stream:
        return answer_stream(request, running, form)
    return await answer_whole(request, running, form)
