"""`POST /v1/score` and `/v1/rerank`: pairs of texts, scored by a head of one label."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...engine.errors import NotAClassifier
from ...engine.messages import Pooling
from ...platform.keys.principal import Principal, Scope
from ..contract.errors import ApiError
from ..contract.promises import answers
from ..formats.activation import activated
from ..formats.answering import SERVED_HEADERS, answer_headers
from ..formats.generation_errors import SCORE_ERRORS
from ..http.auth import require
from ..http.bodies import INFERENCE_BODY_BYTES, json_body
from ..http.json_response import encode_json
from ..http.request_context import split_key
from ..schemas.scores import (
    DocumentText,
    RankedDocument,
    Ranking,
    RerankBody,
    Score,
    ScoreBody,
    ScoreList,
)
from ..server.runtime import CurrentRuntime, Runtime
from .pooled import Pooled, run_pooled

router = APIRouter()

Caller = Annotated[Principal, Depends(require(Scope.INFER))]
ScoreRequest = Annotated[ScoreBody, Depends(json_body(ScoreBody, INFERENCE_BODY_BYTES))]
RerankRequest = Annotated[RerankBody, Depends(json_body(RerankBody, INFERENCE_BODY_BYTES))]


@router.post("/v1/score")
@answers(ScoreList, errors=SCORE_ERRORS, headers=SERVED_HEADERS)
async def score(
    request: Request,
    runtime: CurrentRuntime,
    principal: Caller,
    body: ScoreRequest,
) -> Response:
    """Score pairs of texts."""
    scored = await _score(request, runtime, principal, body, prompt_param="text_2")
    answer = ScoreList(
        id=f"score-{request.state.request_id}",
        created=int(time.time()),
        model=scored.pooled.running.order.model.name,
        data=[Score(index, value) for index, value in enumerate(scored.values)],
        usage=scored.pooled.usage,
    )
    headers = answer_headers(scored.pooled.running)
    return Response(encode_json(answer), media_type="application/json", headers=headers)


@router.post("/score")
@answers(ScoreList, errors=SCORE_ERRORS, headers=SERVED_HEADERS)
async def score_at_root(
    request: Request, runtime: CurrentRuntime, principal: Caller, body: ScoreRequest
) -> Response:
    """Score pairs as `/v1/score`, under vLLM's path without a version."""
    return await score(request, runtime, principal, body)


@router.post("/v1/rerank")
@answers(Ranking, errors=SCORE_ERRORS, headers=SERVED_HEADERS)
async def rerank(
    request: Request,
    runtime: CurrentRuntime,
    principal: Caller,
    body: RerankRequest,
) -> Response:
    """Rank documents by their relevance to a query."""
    scored = await _score(request, runtime, principal, body, prompt_param="documents")
    ranked = list(_ranked(scored.values, body))
    answer = Ranking(
        id=f"rerank-{request.state.request_id}",
        model=scored.pooled.running.order.model.name,
        results=ranked[: body.top_n or None],
        usage=scored.pooled.usage,
    )
    headers = answer_headers(scored.pooled.running)
    return Response(encode_json(answer), media_type="application/json", headers=headers)


@router.post("/v2/rerank")
@answers(Ranking, errors=SCORE_ERRORS, headers=SERVED_HEADERS)
async def rerank_v2(
    request: Request, runtime: CurrentRuntime, principal: Caller, body: RerankRequest
) -> Response:
    """Rank documents as `/v1/rerank`, under the path of Cohere's clients."""
    return await rerank(request, runtime, principal, body)


@router.post("/rerank")
@answers(Ranking, errors=SCORE_ERRORS, headers=SERVED_HEADERS)
async def rerank_at_root(
    request: Request, runtime: CurrentRuntime, principal: Caller, body: RerankRequest
) -> Response:
    """Rank documents as `/v1/rerank`, under vLLM's path without a version."""
    return await rerank(request, runtime, principal, body)


class _Scored(NamedTuple):
    pooled: Pooled
    values: list[float]


async def _score(
    request: Request,
    runtime: Runtime,
    principal: Principal,
    body: ScoreBody | RerankBody,
    *,
    prompt_param: str,
) -> _Scored:
    """The score of each pair. Raises ApiError, an EngineError or a LimitReached."""
    inference = runtime.inference
    model = await inference.models.resolve(principal, body.model, request_id=split_key(request))
    if model.classification is None:
        raise NotAClassifier
    if len(model.classification.labels) != 1:
        raise ApiError("not_a_scorer")
    prompts = await inference.prompts.encode_pairs(
        principal,
        body.pairs,
        tokenizer=model.own_tokenizer,
        add_special_tokens=body.adds_special_tokens,
        truncate=body.truncate_prompt_tokens,
        max_second_tokens=body.max_tokens_per_doc if isinstance(body, RerankBody) else None,
    )
    pooled = await run_pooled(
        request,
        inference,
        principal,
        model,
        prompts,
        body,
        pooling=Pooling.CLASSIFY,
        prompt_param=prompt_param,
    )
    problem_type, is_wanted = model.classification.problem_type, body.use_activation is not False
    values = [
        activated(outputs, problem_type, is_wanted=is_wanted)[0] for outputs in pooled.vectors
    ]
    return _Scored(pooled, values)


def _ranked(values: list[float], body: RerankBody) -> Iterator[RankedDocument]:
    """All documents, the best first."""
    for index in sorted(range(len(values)), key=values.__getitem__, reverse=True):
        text = None if body.return_documents is False else DocumentText(body.documents[index])
        yield RankedDocument(index, values[index], text)
