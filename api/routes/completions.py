"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...platform.keys.principal import Principal, Scope
from ..contract.promises import answers
from ..formats.answering import SERVED_HEADERS, answer_stream, answer_whole
from ..formats.completions import CompletionFormat
from ..formats.generation_errors import GENERATION_ERRORS, GRAMMAR_ERRORS
from ..formats.sampled import open_sample
from ..http.auth import require
from ..http.bodies import INFERENCE_BODY_BYTES, json_body
from ..http.disconnects import unless_disconnected
from ..http.request_context import held_charge, split_key
from ..inference.echo import Echo
from ..inference.inference import Inference
from ..inference.order import Order
from ..inference.served_models import ServedModel
from ..samples.content import CompletionContent
from ..samples.open_sample import OpenSample
from ..schemas.answers import Completion
from ..schemas.completions import CompletionBody
from ..schemas.generation import members_of
from ..schemas.slo import targets_of
from ..server.runtime import CurrentRuntime

router = APIRouter(prefix="/v1")


@router.post("/completions")
@answers(
    Completion,
    stream=Completion,
    errors=(*GENERATION_ERRORS, *GRAMMAR_ERRORS),
    headers=SERVED_HEADERS,
)
async def create_completion(
    request: Request,
    runtime: CurrentRuntime,
    principal: Annotated[Principal, Depends(require(Scope.INFER))],
    body: Annotated[CompletionBody, Depends(json_body(CompletionBody, INFERENCE_BODY_BYTES))],
) -> Response:
    """Complete one or more prompts, as one response or as a stream of events."""
    inference = runtime.inference
    model = await inference.models.resolve(
        principal,
        body.model,
        adapters=members_of(body.adapters),
        request_id=split_key(request),
    )
    prompts = await inference.prompts.encode(
        principal,
        body.prompt,
        tokenizer=model.own_tokenizer,
        add_special_tokens=body.adds_special_tokens,
        truncate=body.truncate_prompt_tokens,
        max_tokens=1 if body.endless else body.output_limit,
    )
    order = Order(
        request_id=request.state.request_id,
        arrived_at=request.state.started_at,
        measures=request.state.measures,
        held_charge=held_charge(request),
        principal=principal,
        model=model,
        prompts=prompts,
        num_choices=body.num_generated,
        priority=body.priority or 0,
        deadline_ms=body.deadline_ms,
        targets=targets_of(body.slo),
        speculation=body.speculation_params,
        kv_policy=body.kv_policy_params,
        is_endless=bool(body.endless),
        sampling=body.sampling(
            max_tokens=body.output_limit,
            num_logprobs=body.num_logprobs,
            grammar=body.form_grammar,
            defaults=inference.generation_defaults,
        ),
        text=body.text_form(continues_prompt=True),
        bad_words=tuple(body.bad_words or ()),
        num_prompt_logprobs=body.num_prompt_logprobs,
        grammar_param=body.form_param,
        is_private=body.store is False,
        sample=_sample(request, runtime.inference, model, body),
    )
    echoes: Sequence[Echo] = ()
    if body.echo:
        is_cut = body.truncate_prompt_tokens is not None
        echoes = await inference.prompts.echo(
            principal, body.prompt, prompts, tokenizer=model.own_tokenizer, is_cut=is_cut
        )
    running = await unless_disconnected(request.receive, inference.start(order))
    form = CompletionFormat(
        order,
        inference.tokenizer_of(model),
        streams_usage=body.includes_usage,
        echoes=echoes,
        num_prompt_logprobs=body.prompt_logprobs,
        num_returned=body.num_choices,
        returns_logprobs=body.logprobs is not None,
    )
    if body.stream:
        return answer_stream(request, running, form)
    return await answer_whole(request, running, form)


def _sample(
    request: Request, inference: Inference, model: ServedModel, body: CompletionBody
) -> OpenSample | None:
    """What is kept of the request; None: nothing, as of one whose prompt is token ids or is cut."""
    prompt = body.prompt[0]
    if not isinstance(prompt, str) or body.truncate_prompt_tokens is not None:
        return None
    return open_sample(
        request,
        inference,
        model,
        store=body.store,
        num_sequences=len(body.prompt) * body.num_generated,
        make_content=lambda: CompletionContent(prompt),
    )
