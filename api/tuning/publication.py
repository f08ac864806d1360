"""Publishes the result of a job as a version of its adapter, through the intake of uploads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

from ...adapters.errors import AdapterRejected
from ...adapters.wiping import file_digest
from ...platform.adapters import service as adapters
from ...platform.adapters.lookup import version_of
from ...platform.adapters.models import AdapterVersion
from ...platform.adapters.states import VersionState
from ...platform.adapters.uploads import NewUpload
from ...platform.audit.event import BY_SYSTEM
from ...platform.errors import InvalidTransition, QuotaExceeded, VersionNotFound
from ...platform.keys.principal import SYSTEM, Principal
from ...platform.sessions import TenantSession
from ...platform.tuning.models import TuningJob
from ..adapters.pushes import Pushed, Pushes
from ..contract.errors import ApiError
from ..control_plane.control_plane import ControlPlane
from .job_failed import JobFailed
from .work_folders import WorkFolder

ATTESTATION_SECONDS = 0.5
"""How often the version is looked at until it is ready."""
_CHUNK_BYTES = 1 << 20


class Publication:
    """Pushes results; one for the server."""

    def __init__(self, pushes: Pushes, control_plane: ControlPlane) -> None:
        self._pushes = pushes
        self._control_plane = control_plane

    async def publish(self, job: TuningJob, tenant_slug: str, folder: WorkFolder) -> int:
        """The number of the version, which is ready. May be repeated: the same content is one
        version.

        Raises JobFailed if the adapter is refused, and a PlatformError or AdapterError that may
        pass.
        """
        try:
            pushed = await self._push(job, tenant_slug, folder)
            await self._wait_until_ready(job.tenant_id, pushed)
        except AdapterRejected as exc:
            raise JobFailed(exc.reason, str(exc)) from exc
        except (QuotaExceeded, InvalidTransition, VersionNotFound) as exc:
            raise JobFailed(exc.code, str(exc)) from exc
        except ApiError as exc:
            raise JobFailed(exc.code, exc.message) from exc
        return pushed.version

    async def _push(self, job: TuningJob, tenant_slug: str, folder: WorkFolder) -> Pushed:
        new = await asyncio.to_thread(self._declare, job, folder)
        principal = Principal(
            tenant_id=job.tenant_id,
            tenant_slug=tenant_slug,
            actor=SYSTEM,
            scopes=frozenset(),
            key_id=None,
        )
        upload = await self._pushes.open(principal, new, BY_SYSTEM, declared_base_id=None)
        if upload.received_bytes < upload.size_bytes:
            offset = upload.received_bytes
            await self._pushes.receive(
                job.tenant_id,
                upload.id,
                offset=offset,
                read=lambda _: _read(folder.weights_file, offset),
                num_bytes=upload.size_bytes - offset,
            )
        return await self._pushes.commit(job.tenant_id, upload.id, BY_SYSTEM)

    def _declare(self, job: TuningJob, folder: WorkFolder) -> NewUpload:
        try:
            config = json.dumps(json.loads(folder.config_file.read_bytes()))
        except ValueError as exc:
            raise JobFailed("training_failed", "The trainer wrote no configuration.") from exc
        return NewUpload(
            adapter_name=job.adapter_name,
            config_json=config,
            size_bytes=folder.weights_file.stat().st_size,
            sha256=file_digest(folder.weights_file).hexdigest(),
            server_id=self._pushes.server_id,
            is_in_store=not self._pushes.is_store_here,
            created_by=job.created_by,
        )

    async def _wait_until_ready(self, tenant_id: str, pushed: Pushed) -> None:
        """Return when the version may be used. Raises JobFailed if it is rejected."""

        def find(session: TenantSession) -> AdapterVersion:
            return version_of(adapters.get_adapter(session, pushed.adapter_name), pushed.version)

        while True:
            version = await self._control_plane.read(tenant_id, find)
            if version.state is VersionState.READY:
                return
            if version.state is VersionState.REJECTED:
                reason = version.reason_code or "training_failed"
                raise JobFailed(reason, version.reason_message or "The adapter was rejected.")
            await asyncio.sleep(ATTESTATION_SECONDS)


async def _read(path: Path, offset: int) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
            yield chunk
