"""`/admin/prices`: what tokens cost. For operators without a tenant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from ...platform.audit.event import Changed, Event
from ...platform.base import utc_now
from ...platform.errors import InvalidValue
from ...platform.keys.principal import OperatorPrincipal, OperatorRole
from ...platform.names import MAX_SLUG_LENGTH
from ...platform.prices import service
from ...platform.prices.models import MAX_BASE_LENGTH
from ...platform.prices.money import format_money, parse_money
from ...platform.prices.price import MAX_PRICE
from ...platform.prices.service import ListedPrice
from ...platform.sessions import PlatformSession
from ...platform.tenants.repository import slugs_of
from ...platform.tenants.service import get_tenant
from ..contract.promises import answers
from ..http.auth import origin_of, require_operator
from ..http.bodies import json_body
from ..http.json_response import json_response
from ..schemas.adapters import PageView
from ..schemas.money import PriceBody, PriceEndBody, PriceView
from ..server.runtime import CurrentRuntime
from .pages import Page

router = APIRouter(prefix="/admin/prices")

Reader = Annotated[
    OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN, OperatorRole.VIEWER))
]
Writer = Annotated[OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN))]

MAX_ID = 2**31 - 1


@router.get("")
@answers(PageView[PriceView], errors=("tenant_not_found",))
async def list_prices(
    runtime: CurrentRuntime,
    operator: Reader,
    page: Page,
    base: Annotated[str | None, Query(max_length=MAX_BASE_LENGTH)] = None,
    tenant: Annotated[
        str | None, Query(max_length=MAX_SLUG_LENGTH, description="Only the tenant's own prices.")
    ] = None,
    own: Annotated[
        bool | None,
        Query(description="True: only prices of single tenants; false: only those of all tenants."),
    ] = None,
    current: Annotated[
        bool, Query(description="Only prices that are in effect now or will be.")
    ] = False,
) -> Response:
    """List prices in the order in which they were set, also those that are superseded."""
    after = _parse_cursor(page.after)

    def read(session: PlatformSession) -> PageView[PriceView]:
        prices = service.list_prices(
            session,
            after=after,
            limit=page.num_rows,
            base=base,
            tenant_id=None if tenant is None else get_tenant(session, tenant).id,
            own=own,
            current_at=utc_now() if current else None,
        )
        owners = {price.row.tenant_id for price in prices}
        slugs = slugs_of(session, {owner for owner in owners if owner is not None})
        currency = service.find_currency(session) or ""
        return page.answer(
            prices,
            view=lambda price: _view(price, currency, slugs),
            cursor=lambda price: str(price.row.id),
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
    trained = 0
    if body.trained_tokens is not None:
        trained = parse_money(body.trained_tokens, param="trained_tokens", most=MAX_PRICE)

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
            trained=trained,
            batch_discount=body.batch_discount,
            effective_from=body.effective_from,
        )
        (price,) = service.list_prices(session, after=row.id - 1, limit=1)
        view = _view(price, body.currency, {tenant.id: tenant.slug} if tenant else {})
        return Changed(view, _event(view))

    view = await runtime.control_plane.change_platform(origin_of(request, operator), change)
    return json_response(view, status_code=201)


@router.post("/end")
@answers(PriceView, errors=("tenant_not_found", "price_not_found"))
async def end_price(
    request: Request,
    runtime: CurrentRuntime,
    operator: Writer,
    body: Annotated[PriceEndBody, Depends(json_body(PriceEndBody))],
) -> Response:
    """End a tenant's own prices.

    From `effective_from` on, the tenant pays the prices of all tenants. Own prices that begin later
    still do. The response has the prices that end.
    """
    base = body.base or runtime.inference.served_model_name

    def change(session: PlatformSession) -> Changed[PriceView]:
        tenant = get_tenant(session, body.tenant)
        price = service.end_own_price(
            session, base=base, tenant_id=tenant.id, effective_from=body.effective_from
        )
        currency = service.find_currency(session) or ""
        view = _view(price, currency, {tenant.id: tenant.slug})
        return Changed(view, _end_event(view))

    view = await runtime.control_plane.change_platform(origin_of(request, operator), change)
    return json_response(view)


def _parse_cursor(after: str | None) -> int:
    if after is None:
        return 0
    if not (after.isascii() and after.isdecimal() and int(after) <= MAX_ID):
        raise InvalidValue("Not a `next_after` value of this list.", param="after")
    return int(after)


def _view(price: ListedPrice, currency: str, slugs: Mapping[str, str]) -> PriceView:
    row = price.row
    return PriceView(
        id=row.id,
        base=row.base,
        tenant=None if row.tenant_id is None else slugs[row.tenant_id],
        currency=currency,
        prompt_tokens=format_money(row.prompt),
        cached_tokens=format_money(row.cached),
        completion_tokens=format_money(row.completion),
        trained_tokens=format_money(row.trained),
        batch_discount=row.batch_discount,
        effective_from=row.effective_from,
        effective_until=price.effective_until,
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
        "trained_tokens": view.trained_tokens,
        "batch_discount": view.batch_discount,
        "effective_from": view.effective_from.isoformat(),
    }
    return Event("price.set", view.base, details)


def _end_event(view: PriceView) -> Event:
    ends_at = view.effective_until
    details = {
        "id": view.id,
        "tenant": view.tenant,
        "effective_until": None if ends_at is None else ends_at.isoformat(),
    }
    return Event("price.end", view.base, details)
