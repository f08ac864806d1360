"""Starts evaluations: for a caller, or because the gate of an alias requires one."""

from __future__ import annotations

from typing import Literal, NamedTuple

from starlette.requests import Request

from ...platform.audit.event import Changed, Event, Origin
from ...platform.base import utc_now
from ...platform.errors import GateNotPassed, PlatformError
from ...platform.evaluations import golden_sets, service
from ...platform.evaluations.models import Evaluation
from ...platform.evaluations.service import BASE, NewEvaluation
from ...platform.keys import repository as keys
from ...platform.keys.principal import Principal, Scope
from ...platform.sessions import TenantSession
from ..contract.errors import ApiError
from ..server.runtime import Runtime


class EvaluationRequest(NamedTuple):
    """What is to be compared, on which golden set of which adapter."""

    adapter_name: str
    golden_set: str
    version: int
    against: int | Literal["base"] | None


async def start_evaluation(
    request: Request,
    runtime: Runtime,
    principal: Principal,
    origin: Origin,
    wanted: EvaluationRequest,
) -> Evaluation:
    """The evaluation that was created. Raises ApiError or a PlatformError."""
    address = request.state.address

    def start(session: TenantSession) -> Changed[Evaluation]:
        key_id, its_address = _asking_key(
            session, principal, wanted, None if address is None else str(address)
        )
        new = NewEvaluation(
            adapter_name=wanted.adapter_name,
            golden_set=wanted.golden_set,
            version=wanted.version,
            against=wanted.against,
            base_name=runtime.inference.served_model_name,
            key_id=key_id,
            address=its_address,
            created_by=principal.actor.author,
        )
        evaluation = service.create(session, new)
        details = {"golden_set": wanted.golden_set, "version": wanted.version}
        return Changed(evaluation, Event("evaluation.start", evaluation.id, details))

    return await runtime.control_plane.change(principal.tenant_id, origin, start)


async def gate_error(
    request: Request,
    runtime: Runtime,
    principal: Principal,
    origin: Origin,
    name: str,
    gate: GateNotPassed,
) -> ApiError:
    """The error for a version that was not evaluated; its evaluation is started if none runs."""
    if gate.evaluation_id is not None:
        return _not_passed(gate, f"The evaluation `{gate.evaluation_id}` runs.")
    against: int | Literal["base"] = BASE if gate.against is None else gate.against
    wanted = EvaluationRequest(name, gate.golden_set, gate.version, against)
    try:
        started = await start_evaluation(request, runtime, principal, origin, wanted)
    except (ApiError, PlatformError) as exc:
        return _not_passed(gate, f"None was started: {exc}")
    return _not_passed(gate, f"The evaluation `{started.id}` was started.")


def _not_passed(gate: GateNotPassed, state: str) -> ApiError:
    return ApiError(gate.code, f"{gate} {state}", param="version")


def _asking_key(
    session: TenantSession, principal: Principal, wanted: EvaluationRequest, address: str | None
) -> tuple[str, str | None]:
    """The key whose requests the evaluation asks, and from which address. Raises ApiError."""
    if not principal.can(Scope.INFER):
        message = f"An evaluation requires the scope `{Scope.INFER}` too."
        raise ApiError("insufficient_scope", message)
    if principal.adapters is not None:
        message = "An evaluation asks the base too: use a key that is not restricted to adapters."
        raise ApiError("key_required", message)
    if principal.key_id is not None:
        return principal.key_id, address
    own = None if principal.user_id is None else _newest_key(session, principal.user_id)
    if own is not None:
        return own, address
    row = golden_sets.get(session, wanted.adapter_name, wanted.golden_set)
    if row.key_id is None:
        message = (
            "An evaluation's requests are those of an API key: create one of your own that may "
            "infer, or set the golden set with a key."
        )
        raise ApiError("key_required", message)
    return row.key_id, row.address


def _newest_key(session: TenantSession, user_id: str) -> str | None:
    """The id of the user's newest key that may ask the base and any adapter, from anywhere."""
    may_ask = [
        key.id
        for key in keys.list_keys(session, user_id=user_id, active_at=utc_now())
        if Scope.INFER in key.scopes and key.adapters is None and key.networks is None
    ]
    return may_ask[-1] if may_ask else None
