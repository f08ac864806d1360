"""Budgets of money: `/admin/tenants/{slug}/budgets`, `/v1/budgets`, and those of users and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...platform.audit.event import Changed, Event, Origin
from ...platform.budgets import service
from ...platform.budgets.service import Spending
from ...platform.keys.principal import OperatorPrincipal, OperatorRole, Principal, Scope
from ...platform.prices.money import format_money, parse_money
from ...platform.quotas.holder import TENANT, Holder, id_of
from ...platform.quotas.models import Period
from ...platform.sessions import TenantSession
from ...platform.tenants.service import get_tenant
from ..contract.promises import answers
from ..http.auth import origin_of, require, require_operator
from ..http.bodies import json_body
from ..http.json_response import json_response
from ..schemas.adapters import ListView
from ..schemas.money import BudgetBody, BudgetView
from ..server.runtime import CurrentRuntime, Runtime
from .callers import Caller, KeyInPath, UserInPath

router = APIRouter()

Viewer = Annotated[Principal, Depends(require(Scope.USAGE_READ))]
Reader = Annotated[
    OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN, OperatorRole.VIEWER))
]
Writer = Annotated[OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN))]
Body = Annotated[BudgetBody, Depends(json_body(BudgetBody))]


@router.get("/v1/budgets")
@answers(ListView[BudgetView])
async def list_budgets(runtime: CurrentRuntime, principal: Viewer) -> Response:
    """The budgets of the tenant, its users and its keys, with their use."""
    return await _list(runtime, principal.tenant_id)


@router.get("/admin/tenants/{slug}/budgets")
@answers(ListView[BudgetView], errors=("tenant_not_found",))
async def list_budgets_of_tenant(runtime: CurrentRuntime, operator: Reader, slug: str) -> Response:
    """The budgets of the tenant, its users and its keys, with their use."""
    return await _list(runtime, await _tenant_id(runtime, slug))


@router.put("/admin/tenants/{slug}/budgets/{period}")
@answers(BudgetView, errors=("tenant_not_found",))
async def set_budget_of_tenant(
    request: Request,
    runtime: CurrentRuntime,
    operator: Writer,
    slug: str,
    period: Period,
    body: Body,
) -> Response:
    """Set what the tenant may spend in each day or month.

    What was spent before in the present period counts. Requests that may cost more than is left are
    refused with `budget_exhausted`.
    """
    tenant_id = await _tenant_id(runtime, slug)
    return await _set(runtime, tenant_id, origin_of(request, operator), TENANT, period, body)


@router.delete("/admin/tenants/{slug}/budgets/{period}")
@answers(None, 204, errors=("tenant_not_found", "budget_not_found"))
async def remove_budget_of_tenant(
    request: Request, runtime: CurrentRuntime, operator: Writer, slug: str, period: Period
) -> Response:
    """Remove the tenant's budget."""
    tenant_id = await _tenant_id(runtime, slug)
    return await _remove(runtime, tenant_id, origin_of(request, operator), TENANT, period)


@router.put("/v1/keys/{key_id}/budgets/{period}")
@answers(BudgetView, errors=("key_not_found",))
async def set_budget_of_key(
    request: Request, runtime: CurrentRuntime, caller: KeyInPath, period: Period, body: Body
) -> Response:
    """Set what may be spent with the key; a key that is rotated passes its budget on."""
    return await _set_for(request, runtime, caller, period, body)


@router.delete("/v1/keys/{key_id}/budgets/{period}")
@answers(None, 204, errors=("key_not_found", "budget_not_found"))
async def remove_budget_of_key(
    request: Request, runtime: CurrentRuntime, caller: KeyInPath, period: Period
) -> Response:
    """Remove the key's budget."""
    return await _remove_for(request, runtime, caller, period)


@router.put("/v1/users/{user_id}/budgets/{period}")
@answers(BudgetView, errors=("user_not_found",))
async def set_budget_of_user(
    request: Request, runtime: CurrentRuntime, caller: UserInPath, period: Period, body: Body
) -> Response:
    """Set what the user may spend with all keys and sessions together."""
    return await _set_for(request, runtime, caller, period, body)


@router.delete("/v1/users/{user_id}/budgets/{period}")
@answers(None, 204, errors=("user_not_found", "budget_not_found"))
async def remove_budget_of_user(
    request: Request, runtime: CurrentRuntime, caller: UserInPath, period: Period
) -> Response:
    """Remove the user's budget."""
    return await _remove_for(request, runtime, caller, period)


async def _tenant_id(runtime: Runtime, slug: str) -> str:
    tenant = await runtime.control_plane.read_all_tenants(lambda session: get_tenant(session, slug))
    return tenant.id


async def _list(runtime: Runtime, tenant_id: str) -> Response:
    spendings: Sequence[Spending] = await runtime.control_plane.read(
        tenant_id, service.list_spendings
    )
    currency = await _currency(runtime)
    return json_response(ListView([_view(spending, currency) for spending in spendings]))


async def _currency(runtime: Runtime) -> str | None:
    return (await runtime.pricing.book()).currency


async def _set_for(
    request: Request, runtime: Runtime, caller: Caller, period: Period, body: BudgetBody
) -> Response:
    manager = caller.manager
    origin = origin_of(request, manager)
    return await _set(
        runtime, manager.tenant_id, origin, caller.holder, period, body, check=caller.check
    )


async def _remove_for(
    request: Request, runtime: Runtime, caller: Caller, period: Period
) -> Response:
    manager = caller.manager
    origin = origin_of(request, manager)
    return await _remove(
        runtime, manager.tenant_id, origin, caller.holder, period, check=caller.check
    )


async def _set(
    runtime: Runtime,
    tenant_id: str,
    origin: Origin,
    holder: Holder,
    period: Period,
    body: BudgetBody,
    *,
    check: Callable[[TenantSession], object] = lambda session: None,
) -> Response:
    amount = parse_money(body.amount, param="amount")

    def change(session: TenantSession) -> Changed[Spending]:
        check(session)
        service.set_budget(session, holder, period, amount, body.alert_percents)
        spendings = service.list_spendings(session, holder)
        spending = next(each for each in spendings if each.budget.period is period)
        details = {
            "period": str(period),
            "amount": format_money(amount),
            "alert_percents": spending.budget.alert_percents,
        }
        return Changed(spending, Event("budget.set", holder, details))

    spending = await runtime.control_plane.change(tenant_id, origin, change)
    return json_response(_view(spending, await _currency(runtime)))


async def _remove(
    runtime: Runtime,
    tenant_id: str,
    origin: Origin,
    holder: Holder,
    period: Period,
    *,
    check: Callable[[TenantSession], object] = lambda session: None,
) -> Response:
    def change(session: TenantSession) -> Changed[None]:
        check(session)
        service.remove_budget(session, holder, period)
        return Changed(None, Event("budget.remove", holder, {"period": str(period)}))

    await runtime.control_plane.change(tenant_id, origin, change)
    return Response(status_code=204)


def _view(spending: Spending, currency: str | None) -> BudgetView:
    budget = spending.budget
    kind, holder_id = _kind_and_id(budget.holder)
    return BudgetView(
        holder=kind,
        id=holder_id,
        name=spending.name,
        period=budget.period,
        currency=currency,
        amount=format_money(budget.amount),
        alert_percents=budget.alert_percents,
        spent=format_money(spending.spent),
        reserved=format_money(spending.reserved),
        remaining=format_money(spending.remaining),
        period_begins_at=spending.begins_at,
        period_ends_at=spending.ends_at,
    )


def _kind_and_id(holder: Holder) -> tuple[Literal["tenant", "user", "key"], str | None]:
    user_id, key_id = id_of(holder)
    if user_id is not None:
        return "user", user_id
    return ("tenant", None) if key_id is None else ("key", key_id)
