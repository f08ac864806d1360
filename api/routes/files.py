"""Downloading what was pushed: the same configuration, and the tensors bit for bit."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse

from ..contract import Raw, answers
from ..runtime import CurrentRuntime
from .parameters import NO_VERSION, Number, Reader, find_version

router = APIRouter(prefix="/v1/adapters/{name}/versions/{number}/files")

_MEDIA_TYPES = {
    "adapter_config.json": "application/json",
    "adapter_model.safetensors": "application/octet-stream",
}


@router.get("/{file}")
@answers(
    Raw("application/json", "application/octet-stream"),
    errors=(*NO_VERSION, "adapter_load_failed", "store_unavailable", "store_denied"),
    headers={
        "repr-digest": "SHA-256 of the whole file (RFC 9530).",
        "content-disposition": "The file's name.",
        "x-loraplex-digest": "The version's content.",
    },
)
async def download(
    runtime: CurrentRuntime,
    principal: Reader,
    name: str,
    number: Number,
    file: Literal["adapter_config.json", "adapter_model.safetensors"],
) -> Response:
    """One file of the adapter, as PEFT reads it. `Repr-Digest` is that of the whole file."""
    found = await find_version(runtime, principal, name, number)
    exported = await runtime.downloads.export(
        found.key, file, base_model_name=found.version.intake_report.get("trained_on")
    )
    return StreamingResponse(
        exported.pieces(),
        media_type=_MEDIA_TYPES[file],
        headers={
            "content-length": str(exported.size_bytes),
            "repr-digest": exported.repr_digest,
            "content-disposition": f'attachment; filename="{file}"',
            "x-loraplex-digest": found.version.digest,
        },
    )
