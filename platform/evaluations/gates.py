"""Gates of aliases: an alias moves to a version only after an evaluation without a regression.

A gate is checked in the transaction that changes the alias. The evaluation has to be of the same
content, on the golden set as it is now, against the version that the alias has now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import select

from ..adapters.lookup import get_bare_adapter
from ..adapters.models import AdapterVersion
from ..base import utc_now
from ..errors import GateNotFound, GateNotPassed, GateRefused
from ..names import check_alias_name
from ..quotas.repository import lock_tenant
from ..sessions import TenantSession
from .golden_sets import get as get_golden_set
from .models import AliasGate, Evaluation, GoldenSetRow
from .states import OPEN_STATES, EvaluationState

ROUNDING = 1e-9
"""What sums of scores may be off: no regression."""


class NewGate(NamedTuple):
    """What a caller sets."""

    adapter_name: str
    alias: str
    golden_set: str
    tolerance: float | None
    """None: that of the golden set."""
    created_by: str


class AliasMove(NamedTuple):
    """A change of an alias's target."""

    adapter_name: str
    alias: str
    present: AdapterVersion | None
    """None: the alias is new."""
    versions: Sequence[AdapterVersion]
    """The versions that get requests after it."""


def put(session: TenantSession, new: NewGate) -> AliasGate:
    """Set the gate of an alias, which need not exist.

    Raises InvalidValue, AdapterNotFound or GoldenSetNotFound.
    """
    check_alias_name(new.alias)
    lock_tenant(session)
    get_golden_set(session, new.adapter_name, new.golden_set)
    row = _find(session, new.adapter_name, new.alias)
    row = row or AliasGate(adapter_name=new.adapter_name, alias=new.alias)
    row.golden_set_name, row.tolerance = new.golden_set, new.tolerance
    row.created_by, row.updated_at = new.created_by, utc_now()
    session.add(row)
    session.flush()
    return row


def get(session: TenantSession, adapter_name: str, alias: str) -> AliasGate:
    """Raises AdapterNotFound or GateNotFound."""
    get_bare_adapter(session, adapter_name)
    found = _find(session, adapter_name, alias)
    if found is None:
        raise GateNotFound(f"The alias {alias!r} of {adapter_name!r} has no gate.")
    return found


def remove(session: TenantSession, adapter_name: str, alias: str) -> None:
    """Raises AdapterNotFound or GateNotFound."""
    session.delete(get(session, adapter_name, alias))
    session.flush()


def remove_all(session: TenantSession, adapter_name: str) -> None:
    """Remove the gates of a deleted adapter."""
    query = select(AliasGate).where(AliasGate.adapter_name == adapter_name)
    for row in session.scalars(query).all():
        session.delete(row)
    session.flush()


def check(session: TenantSession, move: AliasMove) -> str | None:
    """The id of the evaluation that lets the alias move; None: it needs none.

    The present version passes, and so does what an alias without a gate moves to. Raises
    GateNotPassed if an evaluation is missing or has not ended, and GateRefused if it shows a
    regression.
    """
    gate = _find(session, move.adapter_name, move.alias)
    if gate is None:
        return None
    golden_set = get_golden_set(session, move.adapter_name, gate.golden_set_name)
    passed = None
    for version in move.versions:
        if move.present is None or version.digest != move.present.digest:
            passed = _check_version(session, move, gate, golden_set, version)
    return passed


def _check_version(
    session: TenantSession,
    move: AliasMove,
    gate: AliasGate,
    golden_set: GoldenSetRow,
    version: AdapterVersion,
) -> str:
    evaluation = _find_evaluation(session, move, golden_set, version)
    if evaluation is None or evaluation.state in OPEN_STATES:
        raise GateNotPassed(
            f"The alias {move.alias!r} of {move.adapter_name!r} has a gate: version "
            f"{version.number} needs an evaluation on the golden set {golden_set.name!r} "
            f"against {_named(move.present)}.",
            golden_set=golden_set.name,
            version=version.number,
            against=None if move.present is None else move.present.number,
            evaluation_id=None if evaluation is None else evaluation.id,
        )
    tolerance = golden_set.tolerance if gate.tolerance is None else gate.tolerance
    if losses := _losses(evaluation, tolerance):
        raise GateRefused(
            f"The alias {move.alias!r} of {move.adapter_name!r} has a gate: version "
            f"{version.number} is worse than {_named(move.present)} on the golden set "
            f"{golden_set.name!r} by more than {tolerance:g}: {', '.join(losses)} (evaluation "
            f"`{evaluation.id}`)."
        )
    return evaluation.id


def _find_evaluation(
    session: TenantSession, move: AliasMove, golden_set: GoldenSetRow, version: AdapterVersion
) -> Evaluation | None:
    """The newest one that has succeeded, or else one that has not ended."""
    against = None if move.present is None else move.present.digest
    query = select(Evaluation).where(
        Evaluation.adapter_name == move.adapter_name,
        Evaluation.golden_set_name == golden_set.name,
        Evaluation.sha256 == golden_set.sha256,
        Evaluation.judge.is_not_distinct_from(golden_set.judge),
        Evaluation.version_digest == version.digest,
        Evaluation.against_digest.is_not_distinct_from(against),
        Evaluation.state.in_([EvaluationState.SUCCEEDED, *OPEN_STATES]),
    )
    query = query.order_by(Evaluation.created_at.desc(), Evaluation.id.desc())
    found = session.scalars(query).all()
    succeeded = (each for each in found if each.state is EvaluationState.SUCCEEDED)
    return next(succeeded, found[0] if found else None)


def _losses(evaluation: Evaluation, tolerance: float) -> list[str]:
    """The slices with a regression, and their differences."""
    slices: list[dict[str, Any]] = evaluation.slices or []
    return [
        f"{each['slice']} {each['difference']['mean']:+.3f}"
        for each in slices
        if each["difference"]["mean"] < -tolerance - ROUNDING
    ]


def _named(version: AdapterVersion | None) -> str:
    return "the base" if version is None else f"version {version.number}"


def _find(session: TenantSession, adapter_name: str, alias: str) -> AliasGate | None:
    query = select(AliasGate).where(
        AliasGate.adapter_name == adapter_name, AliasGate.alias == alias
    )
    return session.scalars(query).one_or_none()
