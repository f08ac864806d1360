"""JSON responses, encoded by msgspec."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from ..contract.answer_model import AnswerModel

_encoder = msgspec.json.Encoder()


def encode_json(body: AnswerModel) -> bytes:
    return _encoder.encode(body)


def json_response(body: AnswerModel, status_code: int = 200) -> Response:
    return Response(encode_json(body), status_code, media_type="application/json")
