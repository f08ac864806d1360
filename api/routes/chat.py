"""`POST /v1/chat/completions`."""

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
from ..formats.chat import ChatFormat
from ..request_context import split_key
from ..runtime import CurrentRuntime
from ..schemas.answers import ChatChunk, ChatCompletion
from ..schemas.chat import ChatBody
from ..schemas.messages import as_conversation
from ..services.inference import Order
from .generation_errors import GENERATION_ERRORS, GRAMMAR_ERRORS

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
    """Answer a conversation, whole or as a stream of events."""
    inference = runtime.inference
    model = await inference.resolve(principal, body.model, request_id=split_key(request))
    use = body.tool_use
    plan = inference.plan_answer(
        use, form_grammar=body.form_grammar, answer_schema=body.answer_schema
    )
    prompt = await inference.encode_chat(
        principal, as_conversation(body.messages), use.tools if use else ()
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
        sampling=body.sampling(
            max_tokens=max_tokens, num_logprobs=body.num_logprobs, grammar=plan.grammar
        ),
        stop=tuple(body.stop or ()),
        continues_prompt=False,
        visible_token_ids=plan.visible_token_ids,
    )
    running = await unless_disconnected(request.receive, inference.start(order))
    form = ChatFormat(order, plan, inference.tokenizer, streams_usage=body.includes_usage)
    if body.stream:
        return answer_stream(request, running, form)
    return await answer_whole(request, running, form)
