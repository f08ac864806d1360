"""Rows of the catalog as callers see them."""

from __future__ import annotations

from collections.abc import Sequence

from ...adapters.identity import AdapterKey
from ...adapters.residency import Tier
from ...engine.messages import EngineInfo, EngineStats
from ...platform.adapters.models import Adapter, AdapterVersion, Upload
from ...platform.adapters.service import Deletion
from ...platform.base import utc_now
from ..schemas.adapters import (
    AdapterView,
    BaseView,
    DeletedVersion,
    DeletionReceipt,
    Reason,
    UploadView,
    VersionView,
)


class AdapterViews:
    """Views for one tenant at one moment: the engine's snapshot says where weights are."""

    def __init__(self, tenant_slug: str, stats: EngineStats | None) -> None:
        self._tenant_slug = tenant_slug
        self._tiers = {entry.key: entry.tier for entry in stats.adapters} if stats else {}

    def adapter(self, adapter: Adapter) -> AdapterView:
        return AdapterView(
            id=f"{self._tenant_slug}/{adapter.name}",
            name=adapter.name,
            created_at=adapter.created_at,
            aliases={alias.name: alias.version.number for alias in adapter.aliases},
            versions=[self.version(adapter, version) for version in adapter.versions],
        )

    def version(self, adapter: Adapter, version: AdapterVersion) -> VersionView:
        return VersionView(
            id=f"{self._tenant_slug}/{adapter.name}@{version.number}",
            adapter=adapter.name,
            version=version.number,
            digest=version.digest,
            state=version.state,
            reason=_reason(version.reason_code, version.reason_message),
            base_id=version.base_id,
            size_bytes=version.size_bytes,
            aliases=[alias.name for alias in adapter.aliases if alias.version_id == version.id],
            tier=self._tiers.get(AdapterKey(version.tenant_id, version.digest), Tier.STORE),
            created_at=version.created_at,
            report=version.intake_report,
            attestation=version.attestation_report,
        )


def upload_view(upload: Upload) -> UploadView:
    return UploadView(
        id=upload.id,
        adapter=upload.adapter_name,
        state=upload.state,
        received_bytes=upload.received_bytes,
        size_bytes=upload.size_bytes,
        sha256=upload.sha256,
        created_at=upload.created_at,
        reason=_reason(upload.reason_code, upload.reason_message),
    )


def deletion_receipt(name: str, deletions: Sequence[Deletion]) -> DeletionReceipt:
    return DeletionReceipt(
        adapter=name,
        versions=[
            DeletedVersion(
                version=deletion.number,
                digest=deletion.key.digest,
                is_content_shared=deletion.is_content_shared,
            )
            for deletion in deletions
        ],
        deleted_at=utc_now(),
    )


def base_view(name: str, info: EngineInfo) -> BaseView:
    return BaseView(
        id=name,
        base_id=info.base_id,
        model_type=info.model_type,
        num_parameters=info.num_parameters,
        dtype=info.dtype,
        quantization=info.quantization,
        max_model_len=info.max_model_len,
        num_modules=len(info.layout.slices),
        targets=sorted({part.name.rpartition(".")[2] for part in info.layout.slices}),
        refused=info.layout.refused,
    )


def _reason(code: str | None, message: str | None) -> Reason | None:
    return None if code is None else Reason(code, message or "")
