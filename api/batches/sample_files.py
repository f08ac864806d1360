"""Makes files of samples, which only readers of samples see."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...platform.audit.event import Event, Origin
from ...platform.batches.file_models import FilePurpose, StoredFile
from ...platform.errors import NoSamples
from ...platform.keys.principal import Principal
from ...platform.samples import service
from ...platform.samples.models import ExportFormat
from ...platform.samples.sample_seal import SampleSeal
from ...platform.samples.service import SampleFilter
from ...platform.sessions import TenantSession
from ..control_plane.control_plane import ControlPlane
from ..samples.export import line_of
from .tenant_files import ReceivedFile, TenantFiles

_PURPOSES = {
    ExportFormat.TRAINING: FilePurpose.FINE_TUNE,
    ExportFormat.GOLDEN: FilePurpose.EVALS,
}


@dataclass(frozen=True, slots=True)
class SampleSelection:
    """What a file is made of: the newest whole samples of an adapter."""

    adapter_name: str
    wanted: SampleFilter
    form: ExportFormat
    limit: int


class _Page(NamedTuple):
    lines: list[bytes]
    num_rows: int
    last_id: str | None
    """Of the rows; None: there are no more."""


async def make_file(
    control_plane: ControlPlane,
    files: TenantFiles,
    seal: SampleSeal,
    principal: Principal,
    origin: Origin,
    selection: SampleSelection,
) -> StoredFile:
    """Write the samples to a file of the tenant, and say so in the audit log.

    Raises AdapterNotFound, NoSamples, SampleUnreadable, QuotaExceeded or an AdapterError.
    """
    name, form = selection.adapter_name, selection.form
    most = await control_plane.read(
        principal.tenant_id, lambda session: service.num_bytes(session, name, selection.wanted)
    )
    await files.check_room(principal.tenant_id, most)
    with files.staged() as path:
        num_lines = await _write(control_plane, principal.tenant_id, seal, selection, path)
        if num_lines == 0:
            raise NoSamples
        details = {"format": form, "kind": selection.wanted.kind, "samples": num_lines}
        await control_plane.note(principal.tenant_id, origin, Event("sample.export", name, details))
        received = await asyncio.to_thread(_received, path, f"{name}-{form}.jsonl")
        return await files.add(principal, origin, received, _PURPOSES[form], None, has_samples=True)


async def _write(
    control_plane: ControlPlane,
    tenant_id: str,
    seal: SampleSeal,
    selection: SampleSelection,
    path: Path,
) -> int:
    """Write the lines; how many."""
    num_rows = num_lines = 0
    after: str | None = None
    with path.open("wb", buffering=0) as file:
        while True:
            left, place = selection.limit - num_rows, after

            def read(session: TenantSession, left: int = left, place: str | None = place) -> _Page:
                return _page(session, seal, selection, after=place, limit=left)

            page = await control_plane.read(tenant_id, read)
            await asyncio.to_thread(file.write, b"".join(page.lines))
            num_rows += page.num_rows
            num_lines += len(page.lines)
            after = page.last_id
            if after is None or num_rows >= selection.limit:
                return num_lines


def _page(
    session: TenantSession,
    seal: SampleSeal,
    selection: SampleSelection,
    *,
    after: str | None,
    limit: int,
) -> _Page:
    rows = service.list_with_content(
        session, selection.adapter_name, selection.wanted, after=after, limit=limit
    )
    lines = [line for row in rows if (line := line_of(row, seal, selection.form)) is not None]
    return _Page(lines, len(rows), rows[-1].id if rows else None)


def _received(path: Path, filename: str) -> ReceivedFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return ReceivedFile(path, filename, path.stat().st_size, digest)
