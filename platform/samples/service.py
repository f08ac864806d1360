"""Keeps samples, finds them, and erases them.

A sample is written after its answer was sent. So the writer looks again, under the lock of the
catalog, whether the adapter's tenant still wants it: what was turned off or deleted meanwhile
leaves nothing behind.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import ColumnElement, Select, delete, func, or_, select, tuple_
from sqlalchemy.orm import defer

from ..adapters.lookup import get_bare_adapter, lock_catalog
from ..adapters.models import AdapterSampling, AdapterVersion
from ..adapters.states import VersionState
from ..base import utc_now
from ..errors import SampleNotFound, SampleUnreadable
from ..sessions import PlatformSession, TenantSession
from .models import Sample, SampleKind
from .sample_seal import SampleSeal

MAX_SAMPLES = 10_000
"""Of one tenant."""
MAX_TENANT_BYTES = 1 << 30
"""Of the content of all samples of one tenant."""
ROWS_AT_ONCE = 500
"""Rows that one transaction deletes."""
CONTENTS_AT_ONCE = 50
"""Rows whose content one transaction reads."""


class NewSample(NamedTuple):
    """A request with its complete answer."""

    adapter_id: str
    version_number: int
    request_id: str
    kind: SampleKind
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    created_at: datetime
    content: bytes
    """JSON."""


class Added(NamedTuple):
    """What became of new samples; those that nobody wants any more are in neither."""

    num_kept: int
    num_dropped: int
    """There was no room for them."""


class SampleFilter(NamedTuple):
    """Which samples of an adapter."""

    version: int | None = None
    """Of this version; None: of all."""
    kind: SampleKind | None = None
    """Of this kind; None: of both."""
    is_whole: bool = False
    """Without answers that `max_tokens` or the context cut off."""


# --- writing --------------------------------------------------------------------------------------


def add_all(
    session: TenantSession, new: Sequence[NewSample], seal: SampleSeal, *, max_days: int
) -> Added:
    """Keep the samples whose adapter is still sampled. `max_days`: the operator's maximum."""
    lock_catalog(session)
    ids = {each.adapter_id for each in new}
    samplings = {
        row.adapter_id: row
        for row in session.scalars(
            select(AdapterSampling).where(AdapterSampling.adapter_id.in_(ids))
        )
    }
    ready = _ready_versions(session, ids)
    num_rows, num_bytes = session.execute(
        select(func.count(), func.coalesce(func.sum(Sample.size_bytes), 0)).select_from(Sample)
    ).one()
    num_kept = num_dropped = 0
    for each in new:
        sampling = samplings.get(each.adapter_id)
        is_ready = (each.adapter_id, each.version_number) in ready
        if sampling is None or each.created_at <= sampling.since or not is_ready:
            continue
        num_bytes += len(each.content)
        if num_rows + num_kept >= MAX_SAMPLES or num_bytes > MAX_TENANT_BYTES:
            num_dropped += 1
            num_bytes -= len(each.content)
            continue
        kept_for = timedelta(days=min(sampling.days, max_days))
        session.add(_row(each, session.tenant_id, seal, kept_for))
        num_kept += 1
    session.flush()
    return Added(num_kept, num_dropped)


def _ready_versions(session: TenantSession, adapter_ids: Iterable[str]) -> set[tuple[str, int]]:
    query = select(AdapterVersion.adapter_id, AdapterVersion.number).where(
        AdapterVersion.adapter_id.in_(adapter_ids), AdapterVersion.state == VersionState.READY
    )
    return {(adapter_id, number) for adapter_id, number in session.execute(query)}


def _row(new: NewSample, tenant_id: str, seal: SampleSeal, kept_for: timedelta) -> Sample:
    row = Sample(
        id=f"smp_{uuid.uuid4().hex}",
        tenant_id=tenant_id,
        adapter_id=new.adapter_id,
        version_number=new.version_number,
        request_id=new.request_id,
        kind=new.kind,
        finish_reason=new.finish_reason,
        prompt_tokens=new.prompt_tokens,
        completion_tokens=new.completion_tokens,
        size_bytes=len(new.content),
        created_at=new.created_at,
        expires_at=new.created_at + kept_for,
    )
    seal.close(row, new.content)
    return row


# --- reading --------------------------------------------------------------------------------------


def count(session: TenantSession, name: str) -> int:
    """The adapter's samples. Raises AdapterNotFound."""
    adapter = get_bare_adapter(session, name)
    query = select(func.count(Sample.id)).where(Sample.adapter_id == adapter.id, _is_current())
    return session.scalars(query).one()


def num_bytes(session: TenantSession, name: str, wanted: SampleFilter) -> int:
    """The size of the contents of these samples. Raises AdapterNotFound."""
    chosen = _chosen(session, name, wanted, None).order_by(None).subquery()
    query = select(func.coalesce(func.sum(Sample.size_bytes), 0)).join(
        chosen, chosen.c.id == Sample.id
    )
    return session.scalars(query).one()


def list_samples(
    session: TenantSession,
    name: str,
    wanted: SampleFilter = SampleFilter(),
    *,
    after: str | None,
    limit: int,
) -> Sequence[Sample]:
    """At most `limit` samples after the sample `after`, the newest first, without their content.

    Raises AdapterNotFound.
    """
    query = _chosen(session, name, wanted, after).options(defer(Sample.content, raiseload=True))
    return session.scalars(query.limit(limit)).all()


def list_with_content(
    session: TenantSession, name: str, wanted: SampleFilter, *, after: str | None, limit: int
) -> Sequence[Sample]:
    """The same with their content; at most `CONTENTS_AT_ONCE`."""
    query = _chosen(session, name, wanted, after)
    return session.scalars(query.limit(min(limit, CONTENTS_AT_ONCE))).all()


def get_sample(session: TenantSession, name: str, sample_id: str) -> Sample:
    """One sample of the adapter. Raises AdapterNotFound, or SampleNotFound, also if it has
    expired."""
    adapter = get_bare_adapter(session, name)
    query = select(Sample).where(
        Sample.id == sample_id, Sample.adapter_id == adapter.id, _is_current()
    )
    found = session.scalars(query).one_or_none()
    if found is None:
        raise SampleNotFound(f"The adapter has no sample `{sample_id}`.")
    return found


def _chosen(
    session: TenantSession, name: str, wanted: SampleFilter, after: str | None
) -> Select[Sample]:
    adapter = get_bare_adapter(session, name)
    query = select(Sample).where(Sample.adapter_id == adapter.id, _is_current())
    if wanted.version is not None:
        query = query.where(Sample.version_number == wanted.version)
    if wanted.kind is not None:
        query = query.where(Sample.kind == wanted.kind)
    if wanted.is_whole:
        query = query.where(Sample.finish_reason != "length")
    if after is not None:
        last = select(Sample.created_at, Sample.id).where(Sample.id == after)
        query = query.where(tuple_(Sample.created_at, Sample.id) < last.scalar_subquery())
    return query.order_by(Sample.created_at.desc(), Sample.id.desc())


def _is_current() -> ColumnElement[bool]:
    return Sample.expires_at > utc_now()


# --- erasing --------------------------------------------------------------------------------------


def remove(session: TenantSession, name: str, sample_id: str) -> None:
    """Erase one sample. Raises AdapterNotFound or SampleNotFound."""
    session.delete(get_sample(session, name, sample_id))
    session.flush()


def erase(session: TenantSession, name: str) -> int:
    """Erase all samples of the adapter, also those that are being written; how many there were.

    Raises AdapterNotFound.
    """
    lock_catalog(session)
    adapter = get_bare_adapter(session, name)
    sampling = session.get(AdapterSampling, adapter.id)
    if sampling is not None:
        sampling.since = utc_now()
    return _erase(session, select(Sample).where(Sample.adapter_id == adapter.id))


def erase_version(session: TenantSession, version_id: str) -> int:
    """Erase the samples of a version that is being deleted; how many there were."""
    lock_catalog(session)
    query = select(Sample).join(
        AdapterVersion,
        (AdapterVersion.adapter_id == Sample.adapter_id)
        & (AdapterVersion.number == Sample.version_number),
    )
    return _erase(session, query.where(AdapterVersion.id == version_id))


def _erase(session: TenantSession, query: Select[Sample]) -> int:
    rows = session.scalars(query.options(defer(Sample.content))).all()
    for row in rows:
        session.delete(row)
    session.flush()
    return len(rows)


def purge(session: PlatformSession, now: datetime, max_days: int) -> int:
    """Erase some of the samples that have expired, or are older than the operator allows; how
    many."""
    is_over = or_(Sample.expires_at <= now, Sample.created_at <= now - timedelta(days=max_days))
    oldest = select(Sample.id).where(is_over).order_by(Sample.created_at).limit(ROWS_AT_ONCE)
    erased = session.execute(
        delete(Sample).where(Sample.id.in_(oldest.scalar_subquery())).returning(Sample.id)
    )
    return len(erased.all())


def reseal(session: PlatformSession, seal: SampleSeal, after: str) -> str | None:
    """Encrypt some samples under the server's present secret, in the order of their ids.

    The last id that was looked at, after which the next call continues; None: there are no more.
    """
    query = select(Sample).where(Sample.secret_id != seal.current_id, Sample.id > after)
    rows = session.scalars(
        query.order_by(Sample.id).limit(CONTENTS_AT_ONCE).with_for_update()
    ).all()
    for row in rows:
        try:
            seal.close(row, seal.open(row))
        except SampleUnreadable:
            continue  # until it expires, or the operator finds the secret
    return rows[-1].id if rows else None
