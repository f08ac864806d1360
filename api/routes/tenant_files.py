"""`/v1/files`: the data of fine-tuning jobs, golden sets, and the inputs and results of batches, as
in OpenAI's API."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from ...platform.batches import files as service
from ...platform.batches.file_models import MAX_FILENAME_LENGTH, FilePurpose, StoredFile
from ...platform.keys.principal import Principal, Scope
from ..adapters.downloads import ExportedFile
from ..batches.tenant_files import ReceivedFile
from ..contract.errors import ApiError
from ..contract.promises import Raw, answers, terms
from ..http.auth import require
from ..http.bodies import body_chunks, declared_bytes
from ..http.json_response import json_response
from ..http.multipart import FormReader, boundary_of
from ..schemas.batches import CursorPage, DeletedFile, FileView
from ..server.runtime import CurrentRuntime
from .files import FileResponse
from .parameters import RequestOrigin

router = APIRouter(prefix="/v1/files")

Caller = Annotated[Principal, Depends(require(Scope.INFER))]
MAX_FILE_BYTES = 200 << 20
_FORM_BYTES = 64 << 10
"""What a form may have besides its file."""
MIN_KEPT_SECONDS, MAX_KEPT_SECONDS = 3600, 30 * 24 * 3600
MAX_FILES_PAGE = 10_000


@router.post("")
@terms(body=Raw("multipart/form-data"))
@answers(
    FileView,
    errors=(
        *("invalid_form", "invalid_parameter", "unsupported_parameter", "body_too_large"),
        "unsupported_media_type",
        *("request_timeout", "quota_exceeded", "storage_full", "store_unavailable", "store_denied"),
    ),
)
async def upload_file(
    request: Request, runtime: CurrentRuntime, principal: Caller, origin: RequestOrigin
) -> Response:
    """Upload a file: a form with `file`, and `purpose=batch`, `purpose=fine-tune` or
    `purpose=evals`.

    `expires_after[anchor]=created_at` and `expires_after[seconds]` set how long it is kept. Files
    have at most 200 MiB.
    """
    files = runtime.batches.files
    await files.check_room(principal.tenant_id, declared_bytes(request) or MAX_FILE_BYTES)
    with files.staged() as path:
        received, fields = await _receive(request, path)
        purpose = _purpose(fields)
        kept_for = _kept_for(fields)
        for name in fields:
            raise ApiError("unsupported_parameter", f"{name}: is not supported", param=name)
        file = await files.add(principal, origin, received, purpose, kept_for)
    return json_response(file_view(file))


@router.get("")
@answers(CursorPage[FileView])
async def list_files(
    runtime: CurrentRuntime,
    principal: Caller,
    purpose: FilePurpose | None = None,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_FILES_PAGE)] = MAX_FILES_PAGE,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List the tenant's files, the newest first; those of the key itself if it is restricted to
    adapters."""
    found = await runtime.control_plane.read(
        principal.tenant_id,
        lambda session: service.list_files(
            session,
            viewer=principal,
            purpose=purpose,
            after=after,
            limit=limit + 1,
            is_descending=order == "desc",
        ),
    )
    views = [file_view(file) for file in found[:limit]]
    first, last = (views[0].id, views[-1].id) if views else (None, None)
    return json_response(CursorPage(views, len(found) > limit, first, last))


@router.get("/{file_id}")
@answers(FileView, errors=("file_not_found",))
async def get_file(runtime: CurrentRuntime, principal: Caller, file_id: str) -> Response:
    """One file."""
    return json_response(file_view(await _find(runtime, principal, file_id)))


@router.get("/{file_id}/content")
@answers(
    Raw("application/jsonl"),
    errors=("file_not_found", "storage_full", "store_unavailable", "store_denied"),
    headers={
        "repr-digest": "SHA-256 of the whole file (RFC 9530).",
        "content-disposition": "The file's name.",
    },
)
async def get_content(runtime: CurrentRuntime, principal: Caller, file_id: str) -> Response:
    """The bytes of a file."""
    file = await _find(runtime, principal, file_id)
    files = runtime.batches.files
    with files.staged() as path:
        await files.fetch(principal.tenant_id, file, path)
        opened = await asyncio.to_thread(ExportedFile, path)
    return FileResponse(
        opened,
        media_type="application/jsonl",
        headers={
            "content-length": str(opened.size_bytes),
            "repr-digest": opened.repr_digest,
            "content-disposition": f'attachment; filename="{file.id}.jsonl"',
        },
    )


@router.delete("/{file_id}")
@answers(DeletedFile, errors=("file_not_found", "file_in_use"))
async def delete_file(
    runtime: CurrentRuntime, principal: Caller, origin: RequestOrigin, file_id: str
) -> Response:
    """Delete a file and its bytes."""
    await runtime.batches.files.delete(principal, origin, file_id)
    return json_response(DeletedFile(file_id))


def file_view(file: StoredFile) -> FileView:
    return FileView(
        id=file.id,
        bytes=file.size_bytes,
        created_at=int(file.created_at.timestamp()),
        expires_at=int(file.expires_at.timestamp()),
        filename=file.filename,
        purpose=file.purpose,
    )


async def _find(runtime: CurrentRuntime, principal: Principal, file_id: str) -> StoredFile:
    return await runtime.control_plane.read(
        principal.tenant_id, lambda session: service.get_file(session, file_id, viewer=principal)
    )


async def _receive(request: Request, path: Path) -> tuple[ReceivedFile, dict[str, str]]:
    """Write the form's file to `path`; returns it and the form's fields. Raises ApiError."""
    form = FormReader(boundary_of(request.headers.get("content-type", "")))
    hasher = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        async for chunk in body_chunks(request, MAX_FILE_BYTES + _FORM_BYTES):
            for piece in form.feed(chunk):
                hasher.update(piece)
                await asyncio.to_thread(file.write, piece)
    form.finish()
    if not form.num_file_bytes:
        raise ApiError("invalid_parameter", "file: is empty", param="file")
    filename = (form.filename or "")[:MAX_FILENAME_LENGTH]
    received = ReceivedFile(path, filename, form.num_file_bytes, hasher.hexdigest())
    return received, dict(form.fields)


def _purpose(fields: dict[str, str]) -> FilePurpose:
    """What the form says the file is for. Raises ApiError."""
    given = fields.pop("purpose", None)
    for purpose in (FilePurpose.BATCH, FilePurpose.FINE_TUNE, FilePurpose.EVALS):
        if given == purpose:
            return purpose
    message = "purpose: must be `batch`, `fine-tune` or `evals`"
    raise ApiError("invalid_parameter", message, param="purpose")


def _kept_for(fields: dict[str, str]) -> timedelta | None:
    """How long the form asks to keep its file. Raises ApiError."""
    anchor = fields.pop("expires_after[anchor]", None)
    seconds = fields.pop("expires_after[seconds]", None)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        param = "expires_after.anchor"
        raise ApiError("invalid_parameter", f"{param}: must be `created_at`", param=param)
    is_number = seconds is not None and seconds.isascii() and seconds.isdecimal()
    if not is_number or not MIN_KEPT_SECONDS <= int(seconds or 0) <= MAX_KEPT_SECONDS:
        param = "expires_after.seconds"
        message = f"{param}: must be from {MIN_KEPT_SECONDS} to {MAX_KEPT_SECONDS}"
        raise ApiError("invalid_parameter", message, param=param)
    return timedelta(seconds=int(seconds or 0))
