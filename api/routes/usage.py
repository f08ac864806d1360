"""`/v1/usage` and `/admin/usage`: the ledger, grouped and summed, as JSON or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ...platform.errors import InvalidValue
from ...platform.keys.principal import OperatorPrincipal, OperatorRole, Principal, Scope
from ...platform.prices.money import format_money
from ...platform.quotas.limits import MAX_COUNT
from ...platform.usage import service as ledger
from ...platform.usage.models import UsageRecord
from ...platform.usage.repository import NOTHING, Group, GroupKey, UsageQuery, UsageSum
from ..contract.promises import answers
from ..http.auth import require, require_operator
from ..http.json_response import json_response
from ..schemas.adapters import PageView
from ..schemas.usage import UsageRecordView, UsageView
from ..server.runtime import CurrentRuntime, Runtime
from .pages import MAX_PAGE, Page, PageRequest

router = APIRouter()

Reader = Annotated[Principal, Depends(require(Scope.USAGE_READ))]
Operator = Annotated[OperatorPrincipal, Depends(require_operator(*OperatorRole))]
ReadSums = Callable[[UsageQuery], Awaitable[Sequence[UsageSum]]]

CSV = "text/csv"
NANOSECONDS = 10**9
_SEPARATOR = "/"
"""In cursors: no slug and no adapter's name has one."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected days, the grouping, and the format."""

    query: UsageQuery
    page: PageRequest
    is_csv: bool


def select_usage(
    request: Request,
    page: Page,
    since: Annotated[date | None, Query(description="First day, in UTC.")] = None,
    until: Annotated[date | None, Query(description="First day after the range.")] = None,
    group_by: Annotated[list[Group] | None, Query(max_length=len(Group))] = None,
    adapter: Annotated[
        str | None, Query(max_length=64, description="One adapter; empty: the base model.")
    ] = None,
    format_name: Annotated[
        Literal["json", "csv"] | None,
        Query(alias="format", description="Default: as in `Accept`. CSV is not paged."),
    ] = None,
) -> Selection:
    """What the query asks for. Raises InvalidValue."""
    asked = set(group_by or (Group.DAY, Group.ADAPTER, Group.VERSION))
    if Group.VERSION in asked:
        asked.add(Group.ADAPTER)
    groups = tuple(group for group in Group if group in asked)
    after = None if page.after is None else _parse_cursor(page.after, groups)
    is_csv = format_name == "csv" or (
        format_name is None and CSV in request.headers.get("accept", "")
    )
    return Selection(UsageQuery(groups, since, until, adapter, after=after), page, is_csv)


Selected = Annotated[Selection, Depends(select_usage)]


@router.get("/v1/usage")
@answers(PageView[UsageView], also=(CSV,))
async def get_usage(runtime: CurrentRuntime, principal: Reader, selection: Selected) -> Response:
    """The tenant's usage."""
    if Group.TENANT in selection.query.groups:
        raise InvalidValue("A tenant can only see its own usage.", param="group_by")

    async def read(query: UsageQuery) -> Sequence[UsageSum]:
        return await runtime.control_plane.read(
            principal.tenant_id, lambda session: ledger.sum_usage(session, query)
        )

    return await _answer(runtime, selection, read, shows_cost=False)


@router.get("/admin/usage")
@answers(PageView[UsageView], also=(CSV,))
async def get_usage_of_all_tenants(
    runtime: CurrentRuntime,
    operator: Operator,
    selection: Selected,
    tenant: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    """The usage of all tenants or of one."""

    async def read(query: UsageQuery) -> Sequence[UsageSum]:
        return await runtime.control_plane.read_all_tenants(
            lambda session: ledger.sum_usage_of_all_tenants(
                session, query._replace(tenant_slug=tenant)
            )
        )

    return await _answer(runtime, selection, read, shows_cost=True)


@router.get("/v1/usage/requests/{request_id}")
@answers(UsageRecordView, errors=("request_not_found",))
async def get_usage_record(runtime: CurrentRuntime, principal: Reader, request_id: str) -> Response:
    """The ledger entry of one request."""
    row = await runtime.control_plane.read(
        principal.tenant_id, lambda session: ledger.get_record(session, request_id)
    )
    return json_response(_record_view(row))


async def _answer(
    runtime: Runtime, selection: Selection, read: ReadSums, *, shows_cost: bool
) -> Response:
    query, page = selection.query, selection.page
    currency = (await runtime.pricing.book()).currency

    def show(row: UsageSum) -> dict[str, Any]:
        return {**_sums(row, currency), **(_costs(row) if shows_cost else {})}

    if selection.is_csv:
        lines = _csv_lines(query, await read(query._replace(limit=MAX_PAGE)), read, show)
        return StreamingResponse(lines, media_type=CSV)
    rows = await read(query._replace(limit=page.num_rows))
    return json_response(
        page.answer(
            rows,
            view=lambda row: _view(row, query.groups, show),
            cursor=lambda row: _SEPARATOR.join(str(part) for part in row.key),
        )
    )


Show = Callable[[UsageSum], dict[str, Any]]
"""A row without its key, as it is shown."""


async def _csv_lines(
    query: UsageQuery, rows: Sequence[UsageSum], read: ReadSums, show: Show
) -> AsyncIterator[str]:
    """Everything, in parts; `rows` are the first, read before the answer begins."""
    names = [str(group) for group in query.groups]
    yield _csv_text([[*names, *show(NOTHING)]])
    while rows:
        yield _csv_text([[*row.key, *show(row).values()] for row in rows])
        rows = await read(query._replace(after=rows[-1].key, limit=MAX_PAGE))


def _csv_text(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def _view(row: UsageSum, groups: Sequence[Group], show: Show) -> UsageView:
    key: dict[str, Any] = {str(g): part or None for g, part in zip(groups, row.key, strict=True)}
    return UsageView(**key, **show(row))


def _sums(row: UsageSum, currency: str | None) -> dict[str, Any]:
    return {
        "requests": row.num_requests,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "completion_tokens": row.completion_tokens,
        "cold_loads": row.num_cold_loads,
        "residency_byte_seconds": row.residency_byte_seconds,
        "trained_tokens": row.trained_tokens,
        "amount": format_money(row.amount),
        "currency": currency,
        "step_seconds": row.step_nanoseconds / NANOSECONDS,
        "kv_byte_seconds": row.kv_byte_seconds,
        "loaded_bytes": row.loaded_bytes,
        "fetched_bytes": row.fetched_bytes,
    }


def _costs(row: UsageSum) -> dict[str, str]:
    """What operators alone see."""
    margin = row.amount - row.cost
    sign = "-" if margin < 0 else ""
    return {"cost": format_money(row.cost), "margin": sign + format_money(abs(margin))}


def _record_view(row: UsageRecord) -> UsageRecordView:
    return UsageRecordView(
        request_id=row.request_id,
        adapter=row.adapter_name,
        version=row.adapter_version,
        digest=row.adapter_digest,
        composition=row.composition,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        completion_tokens=row.completion_tokens,
        finish_reason=row.finish_reason,
        tier=row.tier,
        load_ms=row.load_ms,
        key_id=row.key_id,
        user_id=row.user_id,
        price_id=row.price_id,
        amount=format_money(row.amount),
        ended_at=row.created_at,
        step_seconds=row.step_nanoseconds / NANOSECONDS,
        kv_byte_seconds=row.kv_byte_seconds,
        loaded_bytes=row.loaded_bytes,
        fetched_bytes=row.fetched_bytes,
    )


def _parse_cursor(text: str, groups: Sequence[Group]) -> GroupKey:
    parts = text.split(_SEPARATOR)
    try:
        return tuple(_parse_part(group, part) for group, part in zip(groups, parts, strict=True))
    except ValueError:
        raise InvalidValue("Not a `next_after` value of this list.", param="after") from None


def _parse_part(group: Group, part: str) -> str | date | int:
    if group is Group.DAY:
        return date.fromisoformat(part)
    if group is Group.VERSION:
        return max(0, min(int(part), MAX_COUNT))  # databases count no further
    return part
