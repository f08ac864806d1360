"""The service level objective of an order: its own targets, its tenant's or the server's."""

from __future__ import annotations

from typing import NamedTuple

from ...engine.messages import LatencyTargets
from ..contract.errors import ApiError
from .order import Order


class Objective(NamedTuple):
    """What the latencies of an order are judged by."""

    targets: LatencyTargets
    set_by: str
    """Who set a target: `request`, `tenant` or, if they set none, `server`."""


def objective_of(order: Order, of_server: LatencyTargets) -> Objective:
    """Raises ApiError if the order asks for more than it has without targets of its own.

    A strict target is paid by others: prompts and drafts beside it get less of each step.
    """
    slo = order.principal.tenant_slo
    of_tenant = LatencyTargets.of_ms(slo.ttft_ms, slo.itl_ms)
    allowed = of_tenant.over(of_server)
    if name := order.targets.stricter_than(allowed):
        seconds = getattr(allowed, f"{name}_seconds")
        rule = (
            "must be omitted: neither the tenant nor the server has this target."
            if seconds is None
            else f"must be at least {seconds * 1000:g} ms, the target without it."
        )
        param = f"slo.{name}_ms"
        raise ApiError("slo_too_strict", f"{param}: {rule}", param=param)
    set_by = "request" if order.targets else "tenant" if of_tenant else "server"
    return Objective(order.targets.over(allowed), set_by)
