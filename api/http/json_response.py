"""JSON responses, encoded by msgspec."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

_encoder = msgspec.json.Encoder()


def encode_json(body: msgspec.Struct) -> bytes:
    return _encoder.encode(body)


def json_response(body: msgspec.Struct, status_code: int = 200) -> Response:
    return Response(encode_json(body), status_code, media_type="application/json")
