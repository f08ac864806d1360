"""Aliases: set, canary, rollback, removal and history.

A change is one transaction: requests admitted before it use the old target, later ones the new
target, and none a mixture. Each change references the one that a rollback from it restores, so
rollbacks go further back and never alternate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..base import JsonObject, utc_now
from ..errors import (
    AliasNotFound,
    BaseMismatch,
    GateNotPassed,
    GateRefused,
    NothingToRollBack,
)
from ..evaluations import gates
from ..evaluations.gates import AliasMove
from ..keys.principal import SYSTEM
from ..names import check_alias_name
from ..sessions import TenantSession
from . import canary_counts, repository, shadow_sums
from .announcements import announce_alias
from .canary import Canary, check_canary
from .canary_limits import CanaryLimits
from .canary_sums import Split
from .history import AliasChange
from .lookup import get_bare_adapter, get_known_adapter, get_ready_version, lock_catalog
from .models import Adapter, AdapterAlias, AdapterVersion
from .states import AliasAction, VersionState


class _Target(NamedTuple):
    """The target of an alias."""

    version: AdapterVersion
    canary: AdapterVersion | None = None
    percent: float | None = None
    limits: JsonObject | None = None

    @property
    def versions(self) -> list[AdapterVersion]:
        """Those that answer its requests."""
        return [self.version] if self.canary is None else [self.version, self.canary]


class _Passage(NamedTuple):
    """What lets an alias move."""

    evaluation_id: str | None = None
    override_reason: str | None = None


def get_alias(session: TenantSession, name: str, alias: str) -> AdapterAlias:
    """The alias's present target. Raises AdapterNotFound or AliasNotFound."""
    return _get_alias(session, get_bare_adapter(session, name), alias)


def get_alias_to_change(session: TenantSession, name: str, alias: str) -> AdapterAlias:
    """The same, locked until this unit of work ends."""
    lock_catalog(session)
    return get_alias(session, name, alias)


def set_alias(
    session: TenantSession,
    name: str,
    alias: str,
    number: int,
    *,
    canary: Canary | None = None,
    override_reason: str | None = None,
    changed_by: str | None = None,
) -> AdapterAlias:
    """Point the alias at a ready version, or split it with a canary.

    Requests admitted from now on follow it. A target that it has already is no change. With
    `override_reason`, it is also set if its gate is not passed.

    Raises InvalidValue, AdapterNotFound, VersionNotFound, AdapterNotReady, GateNotPassed,
    GateRefused, and BaseMismatch if the canary was made for another base.
    """
    check_alias_name(alias)
    if canary is not None:
        check_canary(canary, number)
    lock_catalog(session)
    target = _find_target(session, name, number, canary)
    row = repository.find_alias(session, target.version.adapter_id, alias)
    if row is not None and _target_of(row) == target:
        return row
    present = None if row is None else row.version
    passage = _pass_gate(session, AliasMove(name, alias, present, target.versions), override_reason)
    last = None if row is None else repository.find_last_change(session, row.adapter_id, alias)
    row = _point(session, row or AdapterAlias(adapter_id=target.version.adapter_id), alias, target)
    action = AliasAction.SET if canary is None else AliasAction.CANARY
    previous_number = None if last is None else last.number
    change = _write_down(
        session, row, action, previous_number=previous_number, changed_by=changed_by
    )
    change.evaluation_id, change.override_reason = passage
    session.flush()
    return row


def set_free_aliases(
    session: TenantSession,
    name: str,
    aliases: Sequence[str],
    number: int,
    *,
    changed_by: str | None,
) -> list[str]:
    """Point these aliases at a ready version; returns those whose gates it has not passed, which
    stay where they are. Raises like `set_alias`."""
    closed = []
    for alias in aliases:
        try:
            set_alias(session, name, alias, number, changed_by=changed_by)
        except (GateNotPassed, GateRefused):
            closed.append(alias)
    return closed


def rollback_alias(
    session: TenantSession, name: str, alias: str, *, changed_by: str | None = None
) -> AdapterAlias:
    """Restore the alias's previous target, version and canary; repeating goes further back.

    An alias that was removed and set again cannot be rolled back beyond its removal.

    Raises AdapterNotFound, AliasNotFound, and NothingToRollBack if there is no previous target or
    one of its versions is deleted.
    """
    lock_catalog(session)
    row = _get_alias(session, get_bare_adapter(session, name), alias)
    previous = _find_previous(session, row)
    if previous is None:
        raise NothingToRollBack(f"The alias {alias!r} of {name!r} had no earlier target.")
    target = _restore_target(session, row.adapter_id, previous)
    if target is None:
        raise NothingToRollBack(
            f"A version that the alias {alias!r} of {name!r} pointed at no longer exists: "
            "set it to another."
        )
    _point(session, row, alias, target)
    _write_down(
        session,
        row,
        AliasAction.ROLLBACK,
        previous_number=previous.previous_number,
        changed_by=changed_by,
    )
    return row


def end_canary(session: TenantSession, split: Split, reason: str) -> AdapterAlias | None:
    """Give all requests to the alias's own version; None if the alias has changed since.

    A rollback from there goes back to another version than the alias's own. Raises TenantNotFound.
    """
    lock_catalog(session)
    last = repository.find_last_change(session, split.adapter_id, split.alias)
    row = repository.find_alias(session, split.adapter_id, split.alias)
    if row is None or last is None or last.number != split.change_number:
        return None
    _point(session, row, split.alias, _Target(row.version))
    _write_down(
        session,
        row,
        AliasAction.ROLLBACK,
        previous_number=_find_other(session, row, last),
        changed_by=SYSTEM.author,
        reason=reason,
    )
    return row


def find_limits(session: TenantSession, split: Split) -> CanaryLimits | None:
    """The limits of the alias's canary; None if the alias has changed since."""
    last = repository.find_last_change(session, split.adapter_id, split.alias)
    if last is None or last.number != split.change_number:
        return None
    return CanaryLimits.from_json(last.canary_limits)


def remove_alias(
    session: TenantSession, name: str, alias: str, *, changed_by: str | None = None
) -> None:
    """Forget the alias. Raises AdapterNotFound or AliasNotFound."""
    lock_catalog(session)
    forget_alias(
        session,
        _get_alias(session, get_bare_adapter(session, name), alias),
        changed_by=changed_by,
    )


def forget_alias(
    session: TenantSession, row: AdapterAlias, *, changed_by: str | None = None
) -> None:
    """Remove the alias and write that down; the catalog is locked already."""
    change = _add_change(
        session, row.adapter_id, row.name, AliasAction.REMOVE, changed_by=changed_by
    )
    session.delete(row)
    session.flush()
    shadow_sums.follow(session, change)
    announce_alias(session, change)


def list_alias_changes(
    session: TenantSession, name: str, alias: str, *, limit: int = 50
) -> Sequence[AliasChange]:
    """The newest changes of the alias, the newest first; of removed and deleted ones too.

    Raises AdapterNotFound if no adapter ever had this name.
    """
    adapter = get_known_adapter(session, name)
    return repository.list_alias_changes(session, adapter.id, alias, limit=limit)


def _pass_gate(session: TenantSession, move: AliasMove, override_reason: str | None) -> _Passage:
    """Raises GateNotPassed or GateRefused unless there is a reason to override them."""
    try:
        return _Passage(evaluation_id=gates.check(session, move))
    except (GateNotPassed, GateRefused):
        if override_reason is None:
            raise
        return _Passage(override_reason=override_reason)


def _find_target(session: TenantSession, name: str, number: int, canary: Canary | None) -> _Target:
    version = get_ready_version(session, name, number)
    if canary is None:
        return _Target(version)
    second = get_ready_version(session, name, canary.number)
    if second.base_id != version.base_id:
        raise BaseMismatch("An alias can only be split between versions of the same base model.")
    limits = None if canary.limits is None else canary.limits.as_json()
    return _Target(version, second, float(canary.percent), limits)


def _restore_target(session: TenantSession, adapter_id: str, change: AliasChange) -> _Target | None:
    """The previous target, if all of it may still be used."""
    version = _find_ready(session, adapter_id, change.version_number)
    canary = _find_ready(session, adapter_id, change.canary_number)
    is_whole = (canary is None) == (change.canary_number is None)
    if version is None or not is_whole:
        return None
    return _Target(version, canary, change.canary_percent, change.canary_limits)


def _find_ready(
    session: TenantSession, adapter_id: str, number: int | None
) -> AdapterVersion | None:
    if number is None:
        return None
    version = repository.find_visible_version(session, adapter_id, number)
    is_ready = version is not None and version.state is VersionState.READY
    return version if is_ready else None


def _find_previous(session: TenantSession, row: AdapterAlias) -> AliasChange | None:
    last = repository.find_last_change(session, row.adapter_id, row.name)
    if last is None or last.previous_number is None:
        return None
    return repository.find_change(session, row.adapter_id, row.name, last.previous_number)


def _find_other(session: TenantSession, row: AdapterAlias, change: AliasChange) -> int | None:
    """The number of the latest of the targets before the change that has another version."""
    number = change.previous_number
    while number is not None:
        earlier = repository.find_change(session, row.adapter_id, row.name, number)
        if earlier is None or earlier.version_number != row.version.number:
            return number
        number = earlier.previous_number
    return None


def _get_alias(session: TenantSession, adapter: Adapter, alias: str) -> AdapterAlias:
    row = repository.find_alias(session, adapter.id, alias)
    if row is None:
        raise AliasNotFound(f"The adapter {adapter.name!r} has no alias {alias!r}.")
    return row


def _target_of(row: AdapterAlias) -> _Target:
    return _Target(row.version, row.canary_version, row.canary_percent, row.canary_limits)


def _point(session: TenantSession, row: AdapterAlias, alias: str, target: _Target) -> AdapterAlias:
    row.name = alias
    row.version_id = target.version.id
    row.canary_version_id = None if target.canary is None else target.canary.id
    row.canary_percent = target.percent
    row.canary_limits = target.limits
    session.add(row)
    session.flush()
    session.refresh(row, ["version", "canary_version"])
    return row


def _write_down(
    session: TenantSession,
    row: AdapterAlias,
    action: AliasAction,
    *,
    previous_number: int | None,
    changed_by: str | None,
    reason: str | None = None,
) -> AliasChange:
    change = _add_change(session, row.adapter_id, row.name, action, changed_by=changed_by)
    change.version_number = row.version.number
    change.canary_number = None if row.canary_version is None else row.canary_version.number
    change.canary_percent = row.canary_percent
    change.canary_limits = row.canary_limits
    change.reason = reason
    change.previous_number = previous_number
    session.flush()
    shadow_sums.follow(session, change)
    announce_alias(session, change)
    return change


def _add_change(
    session: TenantSession,
    adapter_id: str,
    alias: str,
    action: AliasAction,
    *,
    changed_by: str | None,
) -> AliasChange:
    last = repository.find_last_change(session, adapter_id, alias)
    change = AliasChange(
        adapter_id=adapter_id,
        alias=alias,
        number=1 if last is None else last.number + 1,
        action=action,
        changed_at=utc_now(),
        changed_by=changed_by,
    )
    session.add(change)
    canary_counts.forget(session, adapter_id, alias)
    return change
