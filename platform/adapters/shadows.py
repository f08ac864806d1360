"""Shadows: versions that answer copies of an alias's requests, which nobody sees."""

from __future__ import annotations

import math

from ..errors import BaseMismatch, InvalidValue, ShadowNotFound
from ..sessions import TenantSession
from . import repository, shadow_sums
from .aliases import get_alias, get_alias_to_change
from .lookup import get_ready_version
from .shadow_models import AliasShadow


def set_shadow(
    session: TenantSession,
    name: str,
    alias: str,
    number: int,
    percent: float,
    *,
    set_by: str | None = None,
) -> AliasShadow:
    """Have a version answer copies of a share of the alias's requests.

    What it has already is no change; anything else begins a comparison at zero.

    Raises InvalidValue, AdapterNotFound, AliasNotFound, VersionNotFound, AdapterNotReady, and
    BaseMismatch if the version was made for another base.
    """
    if not (math.isfinite(percent) and 0 < percent <= 100):
        raise InvalidValue("The percent must be above 0 and at most 100.", param="percent")
    target = get_alias_to_change(session, name, alias)
    if target.version.number == number:
        raise InvalidValue(
            "The shadow must be another version than the alias's own.", param="version"
        )
    if get_ready_version(session, name, number).base_id != target.version.base_id:
        raise BaseMismatch("A shadow must be a version for the same base model.")
    row = shadow_sums.find(session, target.adapter_id, alias)
    if row is not None and (row.version_number, row.percent) == (number, percent):
        return row
    change = repository.find_last_change(session, target.adapter_id, alias)
    assert change is not None, "every target was written down"
    row = row or AliasShadow(adapter_id=target.adapter_id, alias=alias)
    row.version_number, row.percent, row.set_by = number, percent, set_by
    shadow_sums.begin(row, change.number)
    session.add(row)
    session.flush()
    return row


def get_shadow(session: TenantSession, name: str, alias: str) -> AliasShadow:
    """The alias's shadow. Raises AdapterNotFound, AliasNotFound or ShadowNotFound."""
    row = shadow_sums.find(session, get_alias(session, name, alias).adapter_id, alias)
    if row is None:
        raise ShadowNotFound(f"The alias {alias!r} of {name!r} has no shadow.")
    return row


def remove_shadow(session: TenantSession, name: str, alias: str) -> None:
    """End the shadow; its comparison is lost. Raises as `get_shadow`."""
    get_alias_to_change(session, name, alias)
    session.delete(get_shadow(session, name, alias))
    session.flush()
