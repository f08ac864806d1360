"""Converts a conversation to a generation, for chats, responses and messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from starlette.requests import Request

from ...platform.keys.principal import Principal
from ..contract.errors import ApiError
from ..http.request_context import held_charge, split_key
from ..inference.inference import Inference
from ..inference.order import Order
from ..inference.prompts import Prompts
from ..inference.served_models import ServedModel
from ..samples.content import ChatContent
from ..samples.open_sample import OpenSample
from ..schemas.anthropic_messages import MessagesBody
from ..schemas.chat import ChatBody
from ..schemas.generation import members_of
from ..schemas.responses import ResponsesBody
from ..schemas.slo import targets_of
from ..tools.answer_plan import AnswerPlan
from .sampled import open_sample


class ChatOrder(NamedTuple):
    """The generation of a chat, and how its answers are parsed."""

    order: Order
    plan: AnswerPlan


async def order_chat(
    request: Request,
    inference: Inference,
    principal: Principal,
    body: ChatBody | ResponsesBody | MessagesBody,
) -> ChatOrder:
    """Raises ApiError, PlatformError or EngineError if it cannot be generated."""
    model = await inference.models.resolve(
        principal,
        body.model,
        adapters=members_of(body.adapters),
        request_id=split_key(request),
    )
    prompts, use, messages = inference.prompts, body.tool_use, body.conversation()
    form = prompts.reasoning.form_with_effort(body.chat_form, body.effort, param=body.effort_param)
    prompt = await prompts.encode_chat(
        principal,
        messages,
        use.tools if use else (),
        tokenizer=model.own_tokenizer,
        form=form,
    )
    plan = prompts.plan_answer(
        use,
        form_grammar=body.form_grammar,
        answer_schema=body.answer_schema,
        reasoning=prompts.reasoning.of_prompt(
            prompt,
            messages,
            form,
            tokenizer=model.own_tokenizer,
            is_returned=body.returns_reasoning,
        ),
    )
    order = Order(
        request_id=request.state.request_id,
        arrived_at=request.state.started_at,
        measures=request.state.measures,
        held_charge=held_charge(request),
        principal=principal,
        model=model,
        prompts=[prompt],
        num_choices=body.num_choices,
        priority=body.priority or 0,
        deadline_ms=body.deadline_ms,
        targets=targets_of(body.slo),
        speculation=body.speculation_params,
        kv_policy=body.kv_policy_params,
        is_endless=bool(body.endless),
        sampling=body.sampling(
            max_tokens=_output_limit(body, prompts, prompt),
            num_logprobs=body.num_logprobs,
            grammar=plan.grammar,
            defaults=inference.generation_defaults,
        ),
        text=body.text_form(continues_prompt=False, visible_token_ids=plan.visible_token_ids),
        reasoning=plan.reasoning,
        bad_words=tuple(body.bad_words or ()),
        grammar_param="tools" if plan.may_call else body.form_param,
        is_private=body.store is False,
        sample=_sample(request, inference, model, body, plan),
    )
    return ChatOrder(order, plan)


def _output_limit(
    body: ChatBody | ResponsesBody | MessagesBody, prompts: Prompts, prompt: Sequence[int]
) -> int:
    """Raises ApiError if nothing bounds the output."""
    if body.output_limit:
        return body.output_limit
    if body.endless:
        message = "endless: the maximum of output tokens must be given"
        raise ApiError("invalid_parameter", message, param="endless")
    return prompts.room_for_output(prompt)


def _sample(
    request: Request,
    inference: Inference,
    model: ServedModel,
    body: ChatBody | ResponsesBody | MessagesBody,
    plan: AnswerPlan,
) -> OpenSample | None:
    """What is kept of the request; None: nothing, as of one whose answer continues a message."""
    if not body.chat_form.adds_generation_prompt or body.chat_form.continues_final_message:
        return None
    return open_sample(
        request,
        inference,
        model,
        store=body.store,
        num_sequences=body.num_choices,
        make_content=lambda: ChatContent(body.conversation(), body.tool_use, plan.make_reader),
    )
