"""Explains why a version does not answer immediately: the first obstacle.

The state in the database takes precedence over the state in the engine: a version that may not be
used need not be loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...adapters.record import State
from ...adapters.status import AdapterLoad
from ...platform.adapters.models import AdapterVersion
from ...platform.adapters.states import VersionState

REASONS: Mapping[str, str] = {
    "resident": "It is on the device and ready for requests.",
    "being_checked": "Attestation has not finished.",
    "rejected": "It was rejected; see the version's `reason`.",
    "base_mismatch": "It was pushed for another base model than the one served.",
    "engine_unavailable": "The engine is starting, restarting or down.",
    "quarantined": "The engine repeatedly crashed or computed non-finite values with it.",
    "not_loaded": "It is not loaded: the first request loads it.",
    "fetching": "It is being fetched from the store to this machine's disk.",
    "reading": "It is being read from disk into host memory, or waits for space there.",
    "waiting_for_room": "It is in host memory and waits for space on the device.",
    "copying": "It is being copied to the device.",
    "load_failed": "The last attempt to load it failed; the next one follows after a pause.",
}
"""The reasons by code."""

_RETRY_SECONDS = 1.0
_IN_ENGINE: Mapping[str, str] = {
    State.RESIDENT: "resident",
    State.FETCHING: "fetching",
    State.READING: "reading",
    State.HOST: "waiting_for_room",
    State.LOADING: "copying",
    State.FAILED: "load_failed",
}
_UNSERVABLE = frozenset(
    {"being_checked", "rejected", "base_mismatch", "engine_unavailable", "quarantined"}
)
_TRANSIENT = frozenset(
    {"being_checked", "fetching", "reading", "waiting_for_room", "copying", "engine_unavailable"}
)


@dataclass(frozen=True, slots=True)
class VersionReadiness:
    """The readiness of a version; `reason` is one of REASONS."""

    reason: str
    summary: str
    retry_after_seconds: float | None

    @property
    def is_ready(self) -> bool:
        return self.reason == "resident"

    @property
    def is_servable(self) -> bool:
        """Requests for it are accepted, although they may wait for the weights."""
        return self.reason not in _UNSERVABLE


def judge(
    name: str,
    version: AdapterVersion,
    *,
    base_id: str,
    is_engine_ready: bool,
    is_quarantined: bool,
    load: AdapterLoad | None,
    sees_machine: bool,
) -> VersionReadiness:
    """The readiness of the version called `name`.

    `sees_machine`: whether the caller may see the device's memory and its use by others.
    """
    reason = _in_catalog(version, base_id)
    if reason is None:
        reason = _in_engine(load, is_ready=is_engine_ready, is_quarantined=is_quarantined)
    words = _words(reason, version, load, sees_machine=sees_machine)
    return VersionReadiness(reason, f"{name}: {words}", _retry_seconds(reason, load))


def _in_catalog(version: AdapterVersion, base_id: str) -> str | None:
    if version.state is VersionState.REJECTED:
        return "rejected"
    if version.state is not VersionState.READY:
        return "being_checked"
    return "base_mismatch" if version.base_id != base_id else None


def _in_engine(load: AdapterLoad | None, *, is_ready: bool, is_quarantined: bool) -> str:
    if is_quarantined:
        return "quarantined"
    if not is_ready:
        return "engine_unavailable"
    return "not_loaded" if load is None else _IN_ENGINE.get(load.state, "not_loaded")


def _words(
    reason: str, version: AdapterVersion, load: AdapterLoad | None, *, sees_machine: bool
) -> str:
    match reason:
        case "rejected" | "being_checked" if version.reason_code:
            return f"{REASONS[reason]} ({version.reason_code}: {version.reason_message})"
        case "waiting_for_room" if load is not None and load.needed_bytes is not None:
            room = _room(load, load.needed_bytes, sees_machine=sees_machine)
            return f"{REASONS[reason]} {room}{_queue(load)}"
        case "reading" | "fetching" | "copying" if load is not None:
            return f"{REASONS[reason]}{_queue(load)}"
        case "load_failed" if load is not None and load.reason is not None:
            return f"{REASONS[reason]} ({load.reason.code}: {load.reason.message})"
        case _:
            return REASONS[reason]


def _room(load: AdapterLoad, needed_bytes: int, *, sees_machine: bool) -> str:
    needed = f"It needs {_mib(needed_bytes)} of contiguous memory"
    if not sees_machine:
        return f"{needed}."
    return (
        f"{needed}; {_mib(load.free_bytes)} are free, the largest free block is "
        f"{_mib(load.largest_free_bytes)}, and {_mib(load.leased_bytes)} are in use by "
        "running requests."
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def _queue(load: AdapterLoad) -> str:
    if load.order <= 0:
        return ""
    return f" {load.order} other load{'s are' if load.order > 1 else ' is'} ahead."


def _retry_seconds(reason: str, load: AdapterLoad | None) -> float | None:
    if reason == "load_failed":
        return load.retry_in_seconds if load else None
    return _RETRY_SECONDS if reason in _TRANSIENT else None
