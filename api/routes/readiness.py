"""`/admin/readiness`: whether this server accepts requests, with details for operators only."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from ...adapters.confinement_probe import ConfinementReport
from ...platform.keys.principal import OperatorPrincipal, OperatorRole
from ..contract.errors import ApiError
from ..contract.promises import answers
from ..http.auth import require_operator
from ..http.json_response import json_response
from ..schemas.readiness import ConfinementView, MechanismView, PossibleActView, ServerReadinessView
from ..server.readiness import Readiness
from ..server.runtime import CurrentRuntime

router = APIRouter(prefix="/admin")

Operator = Annotated[OperatorPrincipal, Depends(require_operator(*OperatorRole))]


@router.get("/readiness")
@answers(ServerReadinessView)
async def get_server_readiness(runtime: CurrentRuntime, operator: Operator) -> Response:
    """Whether the server accepts generation requests, or why not, and its confinement.

    Unlike `/ready`, it returns 200 even if the server is not ready.
    """
    reason = _reason(runtime.readiness)
    return json_response(ServerReadinessView(reason is None, reason, _view(runtime.confinement)))


def _reason(readiness: Readiness) -> str | None:
    try:
        readiness.check()
    except ApiError as exc:
        return exc.message
    return None


def _view(report: ConfinementReport) -> ConfinementView:
    return ConfinementView(
        is_complete=not report.missing,
        mechanisms=[
            MechanismView(state.name, state.is_in_force, state.detail)
            for state in report.mechanisms
        ],
        possible=[PossibleActView(act.act, act.reason) for act in report.possible],
    )
