"""`/admin/prices`: what tokens cost. For operators without a tenant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...platform.audit.event import Changed, Event
from ...platform.errors import InvalidValue
from ...platform.keys.principal import OperatorPrincipal, OperatorRole
from ...platform.prices import service
from ...platform.prices.models import PriceRow
from ...platform.prices.money import format_money, parse_money
from ...platform.prices.price import MAX_PRICE
from ...platform.sessions import PlatformSession
from ...platform.tenants.repository import slugs_of
from ...platform.tenants.service import get_tenant
from ..contract.promises import answers
from ..http.auth import origin_of, require_operator
from ..http.bodies import json_body
from ..http.json_response import json_response
from ..schemas.adapters import PageView
from ..schemas.money import PriceBody, PriceView
from ..server.runtime import CurrentRuntime
from .pages import Page

router = APIRouter(prefix="/admin/prices")

Reader = Annotated[
    OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN, OperatorRole.VIEWER))
]
Writer = Annotated[OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN))]

MAX_ID = 2**31 - 1


@router.get("")
@answers(PageView[PriceView])
async def list_prices(runtime: CurrentRuntime, operator: Reader, page: Page) -> Response:
    """List prices in the order in which they were set, also those that are superseded."""
    after = _parse_cursor(page.after)

    def read(session: PlatformSession) -> PageView[PriceView]:
        rows = service.list_prices(session, after=after, limit=page.num_rows)
        slugs = slugs_of(session, {row.tenant_id for row in rows if row.tenant_id is not None})
        currency = service.find_currency(session) or ""
        return page.answer(
            rows,
            view=lambda row: _view(row, currency, slugs),
            cursor=lambda row: str(row.id),
        )

    return json_response(await runtime.control_plane.read_all_tenants(read))


@router.post("")
@answers(PriceView, 201, errors=("tenant_not_found",))
async def set_price(
    request: Request,
    runtime: CurrentRuntime,
    operator: Writer,
    body: Annotated[PriceBody, Depends(json_body(PriceBody))],
) -> Response:
    """Set prices.

    They supersede the earlier ones from `effective_from` on. Requests are charged by the prices in
    effect when they are admitted. Prices are never changed or removed.
    """
    base = body.base or runtime.inference.served_model_name
    prompt = parse_money(body.prompt_tokens, param="prompt_tokens", most=MAX_PRICE)
    cached = prompt
    if body.cached_tokens is not None:
        cached = parse_money(body.cached_tokens, param="cached_tokens", most=MAX_PRICE)
    completion = parse_money(body.completion_tokens, param="completion_tokens", most=MAX_PRICE)

    def change(session: PlatformSession) -> Changed[PriceView]:
        tenant = None if body.tenant is None else get_tenant(session, body.tenant)
        row = service.set_price(
            session,
            base=base,
            tenant_id=None if tenant is None else tenant.id,
            currency=body.currency,
            prompt=prompt,
            cached=cached,
            completion=completion,
            batch_discount=body.batch_discount,
            effective_from=body.effective_from,
        )
        view = _view(row, body.currency, {tenant.id: tenant.slug} if tenant else {})
        return Changed(view, _event(view))

    view = await runtime.control_plane.change_platform(origin_of(request, operator), change)
    return json_response(view, status_code=201)


def _parse_cursor(after: str | None) -> int:
    if after is None:
        return 0
    if not (after.isascii() and after.isdecimal() and int(after) <= MAX_ID):
        raise InvalidValue("Not a `next_after` value of this list.", param="after")
    return int(after)


def _view(row: PriceRow, currency: str, slugs: Mapping[str, str]) -> PriceView:
    return PriceView(
        id=row.id,
        base=row.base,
        tenant=None if row.tenant_id is None else slugs[row.tenant_id],
        currency=currency,
        prompt_tokens=format_money(row.prompt),
        cached_tokens=format_money(row.cached),
        completion_tokens=format_money(row.completion),
        batch_discount=row.batch_discount,
        effective_from=row.effective_from,
        created_at=row.created_at,
    )


def _event(view: PriceView) -> Event:
    details = {
        "id": view.id,
        "tenant": view.tenant,
        "currency": view.currency,
        "prompt_tokens": view.prompt_tokens,
        "cached_tokens": view.cached_tokens,
        "completion_tokens": view.completion_tokens,
        "batch_discount": view.batch_discount,
        "effective_from": view.effective_from.isoformat(),
    }
    return Event("price.set", view.base, details)
