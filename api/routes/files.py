"""Downloads of adapter files: the same configuration, and the tensors bit for bit."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..adapters.downloads import ExportedFile
from ..contract.promises import Raw, answers
from ..server.runtime import CurrentRuntime
from .parameters import NO_VERSION, Number, Reader, find_version


class FileResponse(StreamingResponse):
    """Sends an exported file and closes it at the end, even if the transfer was interrupted."""

    def __init__(self, exported: ExportedFile, **answer: Any) -> None:
        super().__init__(exported.pieces(), **answer)
        self._exported = exported

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.body_iterator.aclose()  # type: ignore[attr-defined]
            self._exported.close()


router = APIRouter(prefix="/v1/adapters/{name}/versions/{number}/files")

_MEDIA_TYPES = {
    "adapter_config.json": "application/json",
    "adapter_model.safetensors": "application/octet-stream",
}


@router.get("/{file}")
@answers(
    Raw("application/json", "application/octet-stream"),
    errors=(
        *NO_VERSION,
        "adapter_load_failed",
        "storage_full",
        "store_unavailable",
        "store_denied",
    ),
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
    """One file of the adapter in PEFT format. `Repr-Digest` is the digest of the whole file."""
    found = await find_version(runtime, principal, name, number)
    exported = await runtime.downloads.export(
        found.key, file, base_model_name=found.version.intake_report.get("trained_on")
    )
    return FileResponse(
        exported,
        media_type=_MEDIA_TYPES[file],
        headers={
            "content-length": str(exported.size_bytes),
            "repr-digest": exported.repr_digest,
            "content-disposition": f'attachment; filename="{file}"',
            "x-loraplex-digest": found.version.digest,
        },
    )
