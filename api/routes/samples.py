"""`/v1/adapters/{name}/sampling` and `/samples`: samples of an adapter's requests.

No operator has the scopes to read samples, or to turn sampling on.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from ...adapters.identity import AdapterKey
from ...platform.adapters.lookup import contents_of
from ...platform.adapters.models import AdapterSampling
from ...platform.adapters.sampling import find_sampling, set_sampling, stop_sampling
from ...platform.audit.event import Changed, Event
from ...platform.base import utc_now
from ...platform.keys.principal import Principal
from ...platform.samples import service
from ...platform.samples.models import Sample, SampleKind
from ...platform.samples.service import SampleFilter
from ...platform.sessions import TenantSession
from ..batches.sample_files import SampleSelection, make_file
from ..contract.promises import answers
from ..http.auth import Confirmed
from ..http.bodies import json_body
from ..http.json_response import json_response
from ..schemas.adapters import PageView
from ..schemas.aliases import VersionNumber
from ..schemas.batches import FileView
from ..schemas.samples import (
    AdapterSamplingBody,
    SampleContentView,
    SampleExportBody,
    SamplesDeletionView,
    SampleView,
    SamplingView,
)
from ..server.runtime import CurrentRuntime, Runtime
from .pages import Page
from .parameters import Reader, RequestOrigin, SampleReader, SampleWriter
from .tenant_files import file_view

router = APIRouter(prefix="/v1/adapters/{name}")

NO_SAMPLE = ("sample_not_found",)


@router.get("/sampling")
@answers(SamplingView)
async def get_sampling(runtime: CurrentRuntime, principal: Reader, name: str) -> Response:
    """Whether samples of the adapter's requests are kept, and how many there are."""
    await runtime.inference.samples.flush()
    return json_response(await _sampling(runtime, principal, name))


@router.put("/sampling")
@answers(SamplingView, errors=("sampling_forbidden",))
async def turn_sampling_on(
    runtime: CurrentRuntime,
    principal: SampleWriter,
    origin: RequestOrigin,
    name: str,
    body: Annotated[AdapterSamplingBody, Depends(json_body(AdapterSamplingBody))],
) -> Response:
    """Keep samples of a share of the adapter's requests, or change the share or the days.

    The days hold for the samples that are kept from now on.
    """

    def change(session: TenantSession) -> Changed[AdapterSampling]:
        row = set_sampling(
            session,
            name,
            percent=body.percent,
            days=body.days,
            max_days=runtime.inference.samples.max_days,
            changed_by=principal.actor.author,
        )
        return Changed(row, Event("sampling.set", name, {"percent": row.percent, "days": row.days}))

    await runtime.control_plane.change(principal.tenant_id, origin, change)
    return json_response(await _sampling(runtime, principal, name))


@router.delete("/sampling")
@answers(None, 204)
async def turn_sampling_off(
    runtime: CurrentRuntime, principal: SampleWriter, origin: RequestOrigin, name: str
) -> Response:
    """Keep no more samples. Those that exist stay until they expire or are deleted.

    The engine forgets the outputs that it remembered for speculative decoding.
    """

    def change(session: TenantSession) -> Changed[list[AdapterKey]]:
        has_stopped = stop_sampling(session, name)
        event = Event("sampling.remove", name) if has_stopped else None
        return Changed(contents_of(session, name), event)

    _forget_outputs(
        runtime, await runtime.control_plane.change(principal.tenant_id, origin, change)
    )
    return Response(status_code=204)


@router.get("/samples")
@answers(PageView[SampleView])
async def list_samples(
    runtime: CurrentRuntime,
    principal: SampleReader,
    name: str,
    page: Page,
    version: Annotated[VersionNumber | None, Query()] = None,
    kind: Annotated[SampleKind | None, Query()] = None,
) -> Response:
    """List the adapter's samples without their content, the newest first."""
    await runtime.inference.samples.flush()
    rows = await runtime.control_plane.read(
        principal.tenant_id,
        lambda session: service.list_samples(
            session, name, SampleFilter(version, kind), after=page.after, limit=page.num_rows
        ),
    )
    view = page.answer(rows, view=lambda row: _view(name, row), cursor=lambda row: row.id)
    return json_response(view)


@router.delete("/samples")
@answers(SamplesDeletionView)
async def delete_samples(
    runtime: CurrentRuntime,
    principal: SampleWriter,
    confirmed: Confirmed,
    origin: RequestOrigin,
    name: str,
) -> Response:
    """Delete all samples of the adapter, also those that are being written.

    The response is the receipt. Sampling goes on if it is on. Exported files stay. The engine
    forgets the outputs that it remembered for speculative decoding.
    """
    await runtime.inference.samples.flush()

    def erase(session: TenantSession) -> Changed[tuple[SamplesDeletionView, list[AdapterKey]]]:
        num_erased = service.erase(session, name)
        receipt = SamplesDeletionView(name, num_erased, utc_now())
        event = Event("sample.delete", name, {"samples": num_erased})
        return Changed((receipt, contents_of(session, name)), event)

    receipt, contents = await runtime.control_plane.change(principal.tenant_id, origin, erase)
    _forget_outputs(runtime, contents)
    return json_response(receipt)


@router.post("/samples/export")
@answers(
    FileView,
    errors=(
        *("no_samples", "sample_unreadable", "quota_exceeded", "storage_full"),
        *("store_unavailable", "store_denied"),
    ),
)
async def export_samples(
    runtime: CurrentRuntime,
    principal: SampleReader,
    origin: RequestOrigin,
    name: str,
    body: Annotated[SampleExportBody, Depends(json_body(SampleExportBody))],
) -> Response:
    """Make a file of the newest samples, which only readers of samples see.

    Answers that were cut off are left out; so are calls of functions in golden sets. The audit log
    has every export.
    """
    samples = runtime.inference.samples
    await samples.flush()
    wanted = SampleFilter(body.version, body.kind, is_whole=True)
    file = await make_file(
        runtime.control_plane,
        runtime.batches.files,
        samples.seal,
        principal,
        origin,
        SampleSelection(name, wanted, body.format, body.limit),
    )
    return json_response(file_view(file))


@router.get("/samples/{sample_id}")
@answers(SampleContentView, errors=(*NO_SAMPLE, "sample_unreadable"))
async def get_sample(
    runtime: CurrentRuntime,
    principal: SampleReader,
    origin: RequestOrigin,
    name: str,
    sample_id: str,
) -> Response:
    """One sample with its prompt and answer. The audit log has every read."""

    def read(session: TenantSession) -> Changed[Sample]:
        row = service.get_sample(session, name, sample_id)
        return Changed(row, Event("sample.read", sample_id, {"adapter": name}))

    row = await runtime.control_plane.change(principal.tenant_id, origin, read)
    content = msgspec.json.decode(runtime.inference.samples.seal.open(row))
    fields = ("messages", "tools", "answer", "prompt", "completion")
    view = SampleContentView(*_fields(name, row), **{field: content.get(field) for field in fields})
    return json_response(view)


@router.delete("/samples/{sample_id}")
@answers(None, 204, errors=NO_SAMPLE)
async def delete_sample(
    runtime: CurrentRuntime,
    principal: SampleWriter,
    confirmed: Confirmed,
    origin: RequestOrigin,
    name: str,
    sample_id: str,
) -> Response:
    """Delete one sample. The engine forgets all outputs of the adapter that it remembered for
    speculative decoding."""

    def remove(session: TenantSession) -> Changed[list[AdapterKey]]:
        service.remove(session, name, sample_id)
        event = Event("sample.delete", sample_id, {"adapter": name, "samples": 1})
        return Changed(contents_of(session, name), event)

    _forget_outputs(
        runtime, await runtime.control_plane.change(principal.tenant_id, origin, remove)
    )
    return Response(status_code=204)


def _forget_outputs(runtime: Runtime, contents: list[AdapterKey]) -> None:
    for key in contents:
        runtime.engine.forget_outputs(key)


async def _sampling(runtime: Runtime, principal: Principal, name: str) -> SamplingView:
    max_days = runtime.inference.samples.max_days

    def read(session: TenantSession) -> SamplingView:
        row, num_samples = find_sampling(session, name), service.count(session, name)
        if row is None:
            return SamplingView(name, False, *(None,) * 5, num_samples, max_days)
        return SamplingView(
            name,
            True,
            row.percent,
            row.days,
            row.since,
            row.changed_at,
            row.changed_by,
            num_samples,
            max_days,
        )

    return await runtime.control_plane.read(principal.tenant_id, read)


def _view(name: str, row: Sample) -> SampleView:
    return SampleView(*_fields(name, row))


def _fields(name: str, row: Sample) -> tuple[Any, ...]:
    return (
        row.id,
        name,
        row.version_number,
        row.request_id,
        row.kind,
        row.finish_reason,
        row.prompt_tokens,
        row.completion_tokens,
        row.size_bytes,
        row.created_at,
        row.expires_at,
    )
