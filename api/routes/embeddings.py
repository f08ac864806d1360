"""`POST /v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...engine.messages import Pooling
from ...engine.sampling_params import SamplingParams
from ...engine.text.text_form import TextForm
from ...platform.keys.principal import Principal, Scope
from ..contract.errors import ApiError
from ..contract.promises import answers
from ..formats.answering import SERVED_HEADERS, answer_headers
from ..formats.generation_errors import GENERATION_ERRORS
from ..http.auth import require
from ..http.bodies import INFERENCE_BODY_BYTES, json_body
from ..http.disconnects import unless_disconnected
from ..http.json_response import encode_json
from ..http.request_context import held_charge, split_key
from ..inference.inference import Running
from ..inference.order import Order
from ..schemas.embeddings import Embedding, EmbeddingBody, EmbeddingList, EmbeddingUsage
from ..server.runtime import CurrentRuntime

router = APIRouter(prefix="/v1")

LEAST_NORM = 1e-12
"""Shorter vectors are divided by this: one of zeros alone stays what it is."""
_NO_OUTPUT = SamplingParams(max_tokens=0)


@router.post("/embeddings")
@answers(EmbeddingList, errors=GENERATION_ERRORS, headers=SERVED_HEADERS)
async def create_embeddings(
    request: Request,
    runtime: CurrentRuntime,
    principal: Annotated[Principal, Depends(require(Scope.INFER))],
    body: Annotated[EmbeddingBody, Depends(json_body(EmbeddingBody, INFERENCE_BODY_BYTES))],
) -> Response:
    """Embed texts: the model's last hidden states with the adapter, pooled."""
    inference = runtime.inference
    size = runtime.engine.info.embedding_size
    if body.dimensions is not None and body.dimensions > size:
        message = f"dimensions: this model's embeddings have {size}"
        raise ApiError("invalid_parameter", message, param="dimensions")
    model = await inference.models.resolve(principal, body.model, request_id=split_key(request))
    prompts = await inference.prompts.encode(
        principal,
        body.input,
        tokenizer=model.own_tokenizer,
        add_special_tokens=body.adds_special_tokens,
        truncate=body.truncate_prompt_tokens,
    )
    order = Order(
        request_id=request.state.request_id,
        arrived_at=request.state.started_at,
        measures=request.state.measures,
        held_charge=held_charge(request),
        principal=principal,
        model=model,
        prompts=prompts,
        prompt_param="input",
        num_choices=1,
        priority=body.priority or 0,
        deadline_ms=body.deadline_ms,
        sampling=_NO_OUTPUT,
        text=TextForm(continues_prompt=True),
        pooling=Pooling(body.pooling or Pooling.LAST),
    )
    running = await unless_disconnected(request.receive, inference.start(order))
    try:
        content = await unless_disconnected(request.receive, _answer(running, body))
    finally:
        await running.generation.aclose()
    headers = answer_headers(running)
    return Response(content, media_type="application/json", headers=headers)


async def _answer(running: Running, body: EmbeddingBody) -> bytes:
    vectors = [
        next(delta.embedding for delta in deltas if delta.embedding is not None)
        for deltas in await running.generation.whole()
    ]
    num_tokens = running.generation.counts.num_prompt_tokens

    def encode() -> bytes:
        order = running.order
        return encode_json(
            EmbeddingList(
                id=f"embd-{order.request_id}",
                created=int(time.time()),
                model=order.model.name,
                data=list(_encoded(vectors, body)),
                usage=EmbeddingUsage(num_tokens, num_tokens),
            )
        )

    return await asyncio.to_thread(encode)  # millions of numbers take their time


def _encoded(vectors: Sequence[bytes], body: EmbeddingBody) -> Iterator[Embedding]:
    for index, content in enumerate(vectors):
        vector = np.frombuffer(content, "<f4")[: body.dimensions]
        if body.normalize is not False:
            vector = vector / max(float(np.linalg.norm(vector)), LEAST_NORM)
        if body.encoding_format == "base64":
            yield Embedding(index, base64.b64encode(vector.astype("<f4").tobytes()).decode())
        else:
            yield Embedding(index, vector.tolist())
