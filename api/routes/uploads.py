"""Push an adapter: declare it, send its weights in parts, commit.

Bodies are raw bytes, never multipart. After an interruption, a client declares the same content
again or queries the upload, and continues from the returned offset.
"""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from ...platform.adapters import uploads
from ...platform.adapters.uploads import NewUpload
from ...platform.audit.event import Origin
from ...platform.errors import UploadNotFound
from ...platform.keys.principal import Principal
from ..contract.error_codes import REJECTION_CODES
from ..contract.promises import Raw, answers, terms
from ..http.bodies import body_chunks, check_encoding, declared_bytes, json_body
from ..http.json_response import json_response
from ..schemas.adapters import ListView, UploadBody, UploadView, VersionView
from ..server.runtime import CurrentRuntime, Runtime
from .adapter_views import AdapterViews, upload_view
from .parameters import RequestOrigin, Writer, find_version

router = APIRouter(prefix="/v1")


async def _upload_writer(runtime: CurrentRuntime, principal: Writer, upload_id: str) -> Principal:
    """The caller, if the upload is not of an adapter that its key is not for."""
    if principal.adapters is not None:
        upload = await runtime.pushes.get(principal.tenant_id, upload_id)
        if not principal.may_use(upload.adapter_name):
            raise UploadNotFound
    return principal


UploadWriter = Annotated[Principal, Depends(_upload_writer)]


@router.post("/adapters/{name}/uploads")
@answers(
    UploadView,
    200,
    201,
    errors=(
        "adapter_being_deleted",
        "quota_exceeded",
        "disk_share_exceeded",
        "storage_full",
        "store_unavailable",
        "store_denied",
        *REJECTION_CODES,
    ),
)
async def open_upload(
    runtime: CurrentRuntime,
    principal: Writer,
    origin: RequestOrigin,
    name: str,
    body: Annotated[UploadBody, Depends(json_body(UploadBody))],
) -> Response:
    """Declare an adapter upload.

    If a live version with these bytes exists under this name, the response is 200 with `already`,
    and the upload is skipped. If the server has lost the bytes, or its copy is damaged, they are
    sent again.
    """
    declared = NewUpload(
        adapter_name=name,
        config_json=json.dumps(body.config),
        size_bytes=body.size_bytes,
        sha256=body.sha256,
        server_id=runtime.pushes.server_id,
        is_in_store=not runtime.pushes.is_store_here,
        aliases=tuple(body.aliases),
        created_by=principal.actor.author,
    )
    upload = await runtime.pushes.open(principal, declared, origin, declared_base_id=body.base_id)
    if upload.version_id is None:
        return json_response(upload_view(upload), status_code=201)
    known = await _pushed_version(runtime, principal, origin, upload.id)
    return json_response(upload_view(upload, known))


@router.get("/uploads")
@answers(ListView[UploadView])
async def list_uploads(runtime: CurrentRuntime, principal: Writer) -> Response:
    """List the unfinished uploads, oldest first.

    Their declared bytes count against the tenant's share of the server's disk.
    """
    unfinished = await runtime.control_plane.read(
        principal.tenant_id, uploads.list_unfinished_uploads
    )
    views = [upload_view(each) for each in unfinished if principal.may_use(each.adapter_name)]
    return json_response(ListView(views))


@router.delete("/uploads/{upload_id}")
@answers(UploadView, errors=("upload_not_found", "state_conflict"))
async def abandon_upload(
    runtime: CurrentRuntime, principal: UploadWriter, origin: RequestOrigin, upload_id: str
) -> Response:
    """Abandon an unfinished upload.

    Its bytes are deleted immediately. An upload that is being examined cannot be abandoned.
    """
    upload = await runtime.pushes.abandon(principal.tenant_id, upload_id, origin)
    return json_response(upload_view(upload))


@router.get("/uploads/{upload_id}")
@answers(UploadView, errors=("upload_not_found",))
async def get_upload(runtime: CurrentRuntime, principal: UploadWriter, upload_id: str) -> Response:
    """The state of the upload.

    `received_bytes` is the offset to continue from.
    """
    return json_response(upload_view(await runtime.pushes.get(principal.tenant_id, upload_id)))


@router.put("/uploads/{upload_id}/content")
@terms(body=Raw("application/octet-stream"))
@answers(
    UploadView,
    errors=(
        "upload_not_found",
        "upload_conflict",
        "upload_elsewhere",
        "too_many_parts",
        "state_conflict",
        "storage_full",
        "store_unavailable",
        "store_denied",
        "body_too_large",
        "unsupported_media_type",
        "request_timeout",
    ),
)
async def put_content(
    request: Request,
    runtime: CurrentRuntime,
    principal: UploadWriter,
    upload_id: str,
    offset: Annotated[int, Query(ge=0)],
) -> Response:
    """Send the next bytes of the weights.

    The body begins at `offset` of the file. Acknowledged bytes are on the server's disk, or in the
    store if several servers share it; then any server takes the next ones.
    """
    check_encoding(request, "application/octet-stream")
    upload = await runtime.pushes.receive(
        principal.tenant_id,
        upload_id,
        offset=offset,
        num_bytes=declared_bytes(request),
        read=lambda max_bytes: body_chunks(request, max_bytes),
    )
    return json_response(upload_view(upload))


@router.post("/uploads/{upload_id}/commit")
@answers(
    VersionView,
    errors=(
        "upload_not_found",
        "upload_conflict",
        "upload_elsewhere",
        "upload_lost",
        "state_conflict",
        "digest_mismatch",
        "quota_exceeded",
        "adapter_being_deleted",
        "intake_unavailable",
        "storage_full",
        "store_unavailable",
        "store_denied",
        *REJECTION_CODES,
    ),
)
async def commit_upload(
    runtime: CurrentRuntime, principal: UploadWriter, origin: RequestOrigin, upload_id: str
) -> Response:
    """Examine and store the uploaded adapter.

    Returns the new version, which is not attested yet. The request can be repeated.
    """
    return json_response(await _pushed_version(runtime, principal, origin, upload_id))


async def _pushed_version(
    runtime: Runtime, principal: Principal, origin: Origin, upload_id: str
) -> VersionView:
    name, number = await runtime.pushes.commit(principal.tenant_id, upload_id, origin)
    found = await find_version(runtime, principal, name, number)
    return AdapterViews(principal.tenant_slug, runtime.engine.stats).version(*found)
