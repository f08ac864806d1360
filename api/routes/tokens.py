"""`POST /tokenize` and `/detokenize`: at the root, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...platform.keys.principal import Principal, Scope
from ..contract.errors import ApiError
from ..contract.promises import answers
from ..formats.generation_errors import MODEL_ERRORS
from ..http.auth import require
from ..http.bodies import INFERENCE_BODY_BYTES, json_body
from ..http.json_response import json_response
from ..http.request_context import split_key
from ..inference.served_models import ServedModel
from ..schemas.messages import as_conversation
from ..schemas.tokens import DetokenizeBody, Text, TokenizeBody, Tokens
from ..server.runtime import CurrentRuntime, Runtime

router = APIRouter()

Caller = Annotated[Principal, Depends(require(Scope.INFER))]


@router.post("/tokenize")
@answers(Tokens, errors=(*MODEL_ERRORS, "chat_template_missing", "invalid_grammar"))
async def tokenize(
    request: Request,
    runtime: CurrentRuntime,
    principal: Caller,
    body: Annotated[TokenizeBody, Depends(json_body(TokenizeBody, INFERENCE_BODY_BYTES))],
) -> Response:
    """Tokenize a text or a conversation."""
    inference = runtime.inference
    model = await _find_model(request, runtime, principal, body.model)
    own_tokenizer = model.own_tokenizer if model else None
    if body.messages is not None:
        tokens = await inference.prompts.encode_chat(
            principal,
            as_conversation(body.messages),
            [tool.as_tool() for tool in body.tools or ()],
            tokenizer=own_tokenizer,
            form=body.chat_form,
            is_bounded=False,
        )
    else:
        (tokens,) = await inference.prompts.encode(
            principal,
            [body.prompt or ""],
            tokenizer=own_tokenizer,
            add_special_tokens=body.add_special_tokens is not False,
            is_bounded=False,
        )
    entry = (own_tokenizer or inference.tokenizer).vocabulary_entry
    answer = Tokens(
        tokens=tokens,
        count=len(tokens),
        max_model_len=runtime.engine.info.max_model_len,
        token_strs=list(map(entry, tokens)) if body.return_token_strs else None,
    )
    return json_response(answer)


@router.post("/detokenize")
@answers(Text, errors=MODEL_ERRORS)
async def detokenize(
    request: Request,
    runtime: CurrentRuntime,
    principal: Caller,
    body: Annotated[DetokenizeBody, Depends(json_body(DetokenizeBody, INFERENCE_BODY_BYTES))],
) -> Response:
    """Detokenize."""
    model = await _find_model(request, runtime, principal, body.model)
    vocab_size = runtime.inference.vocab_size_of(model)
    if max(body.tokens, default=0) >= vocab_size:
        message = f"tokens: contains token ids outside [0, {vocab_size})"
        raise ApiError("invalid_parameter", message, param="tokens")
    text = await runtime.inference.prompts.decode(
        principal, body.tokens, tokenizer=model.own_tokenizer if model else None
    )
    return json_response(Text(text))


async def _find_model(
    request: Request, runtime: Runtime, principal: Principal, name: str | None
) -> ServedModel | None:
    """The model whose tokens are meant; None if none is named: the base's."""
    if name is None:
        return None
    return await runtime.inference.models.resolve(principal, name, request_id=split_key(request))
