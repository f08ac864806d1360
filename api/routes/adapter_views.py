"""Converts rows of the catalog to API views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...adapters.classification import Task
from ...adapters.identity import AdapterKey
from ...adapters.manager import Tier
from ...adapters.status import AdapterLoad
from ...engine.messages import AdapterExplanation, EngineInfo, EngineStats, SpeculationStats
from ...platform.adapters.canary_limits import CanaryLimits
from ...platform.adapters.history import AliasChange, DeletionReceipt, VersionTransition
from ...platform.adapters.listing import AdapterSummary
from ...platform.adapters.models import (
    Adapter,
    AdapterAlias,
    AdapterVersion,
    AdapterWish,
    Upload,
)
from ...platform.base import JsonObject
from ..adapters.version_readiness import VersionReadiness
from ..schemas.adapters import (
    AdapterSummaryView,
    AdapterView,
    BaseView,
    CanaryView,
    DeletionView,
    EndView,
    Reason,
    SpeculationView,
    TransitionView,
    UploadView,
    VersionView,
)
from ..schemas.aliases import AliasCanaryView, AliasChangeView, AliasView, CanaryLimitsView
from ..schemas.residency import (
    EngineTransitionView,
    LoadView,
    ProposerView,
    ReadinessView,
    WishView,
)


class AdapterViews:
    """Views for one tenant at one time: the engine's snapshot gives the position of weights."""

    def __init__(self, tenant_slug: str, stats: EngineStats | None) -> None:
        self._tenant_slug = tenant_slug
        self._tiers = tiers_of(stats)

    def adapter(self, adapter: Adapter) -> AdapterView:
        return AdapterView(
            id=f"{self._tenant_slug}/{adapter.name}",
            name=adapter.name,
            created_at=adapter.created_at,
            aliases={alias.name: alias.version.number for alias in adapter.aliases},
            canaries={
                alias.name: canary for alias in adapter.aliases if (canary := _canary(alias))
            },
            versions=[self.version(adapter, version) for version in adapter.versions],
        )

    def version(self, adapter: Adapter, version: AdapterVersion) -> VersionView:
        path = f"/v1/adapters/{adapter.name}/versions/{version.number}"
        return VersionView(
            id=f"{self._tenant_slug}/{adapter.name}@{version.number}",
            adapter=adapter.name,
            version=version.number,
            digest=version.digest,
            state=version.state,
            reason=_reason(version.reason_code, version.reason_message),
            state_changed_at=version.state_changed_at,
            base_id=version.base_id,
            size_bytes=version.size_bytes,
            aliases=[alias.name for alias in adapter.aliases if alias.version_id == version.id],
            tier=self._tiers.get(AdapterKey(version.tenant_id, version.digest), Tier.STORE),
            task=_task(version.intake_report),
            features=list(version.intake_report.get("features", ())),
            created_at=version.created_at,
            report=version.intake_report,
            attestation=version.attestation_report,
            lineage=version.lineage,
            history=f"{path}/history",
            readiness=f"{path}/readiness",
        )


def _task(report: Mapping[str, Any]) -> Task:
    return Task.of(is_classifier=report.get("classification") is not None)


def tiers_of(stats: EngineStats | None) -> Mapping[AdapterKey, Tier]:
    """The tier of each adapter in the engine's snapshot."""
    return {entry.key: entry.tier for entry in stats.adapters} if stats else {}


def summary_view(row: AdapterSummary, tiers: Mapping[AdapterKey, Tier]) -> AdapterSummaryView:
    report, attestation = row.latest.intake_report, row.latest.attestation_report or {}
    here = {tiers.get(content, Tier.STORE) for content in row.contents}
    return AdapterSummaryView(
        id=f"{row.tenant_slug}/{row.adapter.name}",
        tenant=row.tenant_slug,
        name=row.adapter.name,
        num_versions=row.num_versions,
        latest_version=row.latest.number,
        state=row.latest.state,
        aliases=row.aliases,
        canaries={alias: CanaryView(*canary) for alias, canary in row.canaries.items()},
        task=_task(report),
        rank=report.get("max_rank") or None,
        bytes=int(row.num_bytes),
        effect=attestation.get("max_logit_delta"),
        tier=next(tier for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.STORE) if tier in here),
        last_used=row.last_used_at,
        requests=int(row.num_requests),
        p95_ms=row.p95_ms,
        created_at=row.adapter.created_at,
    )


def upload_view(upload: Upload, known: VersionView | None = None) -> UploadView:
    """`known` is the version that the adapter has of these bytes already."""
    return UploadView(
        id=upload.id,
        adapter=upload.adapter_name,
        state=upload.state,
        received_bytes=upload.received_bytes,
        size_bytes=upload.size_bytes,
        sha256=upload.sha256,
        created_at=upload.created_at,
        updated_at=upload.updated_at,
        reason=_reason(upload.reason_code, upload.reason_message),
        already=known is not None,
        version=known,
    )


def transition_view(transition: VersionTransition) -> TransitionView:
    return TransitionView(
        state=transition.state,
        reason=_reason(transition.reason_code, transition.reason_message),
        at=transition.at,
    )


def deletion_view(receipt: DeletionReceipt) -> DeletionView:
    return DeletionView(
        version=receipt.version_number,
        digest=receipt.digest,
        requested_at=receipt.requested_at,
        finished_at=receipt.finished_at,
        receipt=receipt.receipt,
    )


def alias_view(name: str, alias: AdapterAlias) -> AliasView:
    return AliasView(
        adapter=name,
        alias=alias.name,
        version=alias.version.number,
        canary=_alias_canary(
            None if alias.canary_version is None else alias.canary_version.number,
            alias.canary_percent,
            alias.canary_limits,
        ),
        updated_at=alias.updated_at,
    )


def alias_change_view(change: AliasChange) -> AliasChangeView:
    return AliasChangeView(
        alias=change.alias,
        action=change.action,
        version=change.version_number,
        canary=_alias_canary(change.canary_number, change.canary_percent, change.canary_limits),
        changed_at=change.changed_at,
        changed_by=change.changed_by,
        reason=change.reason,
        evaluation=change.evaluation_id,
        override=change.override_reason,
    )


def readiness_view(
    full_name: str,
    adapter: Adapter,
    version: AdapterVersion,
    judged: VersionReadiness,
    *,
    wishes: Sequence[AdapterWish],
    explanation: AdapterExplanation | None,
    sees_machine: bool,
) -> ReadinessView:
    load = explanation.load if explanation else None
    return ReadinessView(
        id=full_name,
        adapter=adapter.name,
        version=version.number,
        is_ready=judged.is_ready,
        is_servable=judged.is_servable,
        reason=judged.reason,
        summary=judged.summary,
        retry_after_seconds=judged.retry_after_seconds,
        state=version.state,
        state_changed_at=version.state_changed_at,
        tier=load.tier if load else Tier.STORE,
        wishes=[WishView(wish.kind, wish.created_at, wish.expires_at) for wish in wishes],
        load=None if load is None else _load_view(load, sees_machine=sees_machine),
        speculation=[proposer_view(stats) for stats in explanation.speculation]
        if explanation
        else [],
    )


def proposer_view(stats: SpeculationStats) -> ProposerView:
    return ProposerView(
        proposer=stats.proposer,
        acceptance=stats.acceptance,
        num_tokens=stats.num_tokens,
        drafts=stats.num_drafts,
        draft_tokens=stats.num_draft_tokens,
        accepted_tokens=stats.num_accepted_tokens,
    )


def _load_view(load: AdapterLoad, *, sees_machine: bool) -> LoadView:
    return LoadView(
        state=load.state,
        since_seconds=load.since_seconds,
        is_pinned=load.is_pinned,
        reason=Reason(load.reason.code, load.reason.message) if load.reason else None,
        retry_in_seconds=load.retry_in_seconds,
        loads_ahead=load.order,
        needed_bytes=load.needed_bytes,
        free_bytes=load.free_bytes if sees_machine else None,
        largest_free_bytes=load.largest_free_bytes if sees_machine else None,
        leased_bytes=load.leased_bytes if sees_machine else None,
        transitions=[
            EngineTransitionView(entry.state, entry.seconds_ago, entry.reason)
            for entry in load.transitions
        ],
    )


def base_view(
    name: str, info: EngineInfo, *, num_tokens: int, max_full_matrix_bytes: int
) -> BaseView:
    return BaseView(
        id=name,
        base_id=info.base_id,
        model_type=info.model_type,
        num_parameters=info.num_parameters,
        dtype=info.dtype,
        quantization=info.quantization,
        embedding=EndView(info.embedding_format, info.embedding_bytes),
        output_head=EndView(info.head_format, info.head_bytes),
        max_model_len=info.max_model_len,
        num_tokens=num_tokens,
        num_modules=len(info.layout.slices),
        targets=sorted({part.name.rpartition(".")[2] for part in info.layout.slices}),
        max_full_matrix_bytes=max_full_matrix_bytes,
        refused=info.layout.refused,
        speculation=SpeculationView(info.proposers, info.max_draft_tokens, info.acceptance),
    )


def _canary(alias: AdapterAlias) -> CanaryView | None:
    if alias.canary_version is None or alias.canary_percent is None:
        return None
    return CanaryView(alias.canary_version.number, alias.canary_percent)


def _alias_canary(
    number: int | None, percent: float | None, limits: JsonObject | None
) -> AliasCanaryView | None:
    if number is None or percent is None:
        return None
    known = CanaryLimits.from_json(limits)
    view = None if known is None else CanaryLimitsView(**known.as_json())
    return AliasCanaryView(number, percent, view)


def _reason(code: str | None, message: str | None) -> Reason | None:
    return None if code is None else Reason(code, message or "")
