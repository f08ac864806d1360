"""`POST /v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...engine.messages import Pooling
from ...platform.keys.principal import Principal, Scope
from ..contract.errors import ApiError
from ..contract.promises import answers
from ..formats.answering import SERVED_HEADERS, answer_headers
from ..formats.generation_errors import REQUEST_ERRORS
from ..http.auth import require
from ..http.bodies import INFERENCE_BODY_BYTES, json_body
from ..http.json_response import encode_json
from ..http.request_context import split_key
from ..schemas.embeddings import Embedding, EmbeddingBody, EmbeddingList
from ..schemas.generation import members_of
from ..server.runtime import CurrentRuntime
from .pooled import run_pooled

router = APIRouter(prefix="/v1")

LEAST_NORM = 1e-12
"""Shorter vectors are divided by this: one of zeros alone stays what it is."""


@router.post("/embeddings")
@answers(EmbeddingList, errors=REQUEST_ERRORS, headers=SERVED_HEADERS)
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
    model = await inference.models.resolve(
        principal,
        body.model,
        adapters=members_of(body.adapters),
        request_id=split_key(request),
    )
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
        pooling=Pooling(body.pooling or Pooling.LAST),
        prompt_param="input",
    )

    def encode() -> bytes:
        return encode_json(
            EmbeddingList(
                id=f"embd-{request.state.request_id}",
                created=int(time.time()),
                model=model.name,
                data=list(_encoded(pooled.vectors, body)),
                usage=pooled.usage,
            )
        )

    content = await asyncio.to_thread(encode)  # millions of numbers take their time
    headers = answer_headers(pooled.running)
    return Response(content, media_type="application/json", headers=headers)


def _encoded(
    vectors: Sequence[npt.NDArray[np.float32]], body: EmbeddingBody
) -> Iterator[Embedding]:
    for index, whole in enumerate(vectors):
        vector = whole[: body.dimensions]
        if body.normalize is not False:
            vector = vector / max(float(np.linalg.norm(vector)), LEAST_NORM)
        if body.encoding_format == "base64":
            yield Embedding(index, base64.b64encode(vector.astype("<f4").tobytes()).decode())
        else:
            yield Embedding(index, vector.tolist())
