"""`POST /v1/classify`."""

from __future__ import annotations

import time
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...adapters.classification import Classification
from ...engine.errors import NotAClassifier
from ...engine.messages import Pooling
from ...platform.keys.principal import Principal, Scope
from ..contract.promises import answers
from ..formats.activation import activated
from ..formats.answering import SERVED_HEADERS, answer_headers
from ..formats.generation_errors import CLASSIFICATION_ERRORS
from ..http.auth import require
from ..http.bodies import INFERENCE_BODY_BYTES, json_body
from ..http.json_response import encode_json
from ..http.request_context import split_key
from ..schemas.classification import ClassificationList, ClassifiedInput, ClassifyBody
from ..server.runtime import CurrentRuntime
from .pooled import Pooled, run_pooled

router = APIRouter()

Caller = Annotated[Principal, Depends(require(Scope.INFER))]
ClassifyRequest = Annotated[ClassifyBody, Depends(json_body(ClassifyBody, INFERENCE_BODY_BYTES))]


@router.post("/v1/classify")
@answers(ClassificationList, errors=CLASSIFICATION_ERRORS, headers=SERVED_HEADERS)
async def classify(
    request: Request,
    runtime: CurrentRuntime,
    principal: Caller,
    body: ClassifyRequest,
) -> Response:
    """Classify texts with the adapter's classification head."""
    inference = runtime.inference
    model = await inference.models.resolve(principal, body.model, request_id=split_key(request))
    if model.classification is None:
        raise NotAClassifier
    prompts = await inference.prompts.encode(
        principal,
        body.input,
        tokenizer=model.own_tokenizer,
        add_special_tokens=body.adds_special_tokens,
        truncate=body.truncate_prompt_tokens,
    )
    pooled = await run_pooled(
        request,
        inference,
        principal,
        model,
        prompts,
        body,
        pooling=Pooling.CLASSIFY,
        prompt_param="input",
    )
    answer = ClassificationList(
        id=f"classify-{request.state.request_id}",
        created=int(time.time()),
        model=model.name,
        data=_classified(pooled, model.classification, body),
        usage=pooled.usage,
    )
    headers = answer_headers(pooled.running)
    return Response(encode_json(answer), media_type="application/json", headers=headers)


@router.post("/classify")
@answers(ClassificationList, errors=CLASSIFICATION_ERRORS, headers=SERVED_HEADERS)
async def classify_at_root(
    request: Request, runtime: CurrentRuntime, principal: Caller, body: ClassifyRequest
) -> Response:
    """Classify texts as `/v1/classify`, under vLLM's path."""
    return await classify(request, runtime, principal, body)


def _classified(
    pooled: Pooled, classification: Classification, body: ClassifyBody
) -> list[ClassifiedInput]:
    wants_activation = body.use_activation is not False
    return [
        ClassifiedInput(
            index=index,
            label=classification.labels[int(np.argmax(outputs))],
            probs=activated(outputs, classification.problem_type, is_wanted=wants_activation),
            num_classes=len(outputs),
        )
        for index, outputs in enumerate(pooled.vectors)
    ]
