"""Clocks for limits. Never a server's wall clock, which may be changed.

Servers on one PostgreSQL share the database's clock. Servers on one SQLite file share a machine and
its monotonic clock, which starts at boot and is identified by the kernel's boot id.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from sqlalchemy import extract, func, select

from ..base import new_id, utc_now
from ..sessions import Transaction
from .bucket import Reading

DATABASE_CLOCK = "database"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_NOW = select(extract("epoch", func.clock_timestamp()))

Clock = Callable[[Transaction], Reading]


def read_clock(session: Transaction) -> Reading:
    """The reading of the clock that all servers of this database share."""
    if session.dialect == "sqlite":
        return Reading(_boot_id(), time.monotonic())
    # Not now(): that is when the transaction began, before it waited for locks.
    return Reading(DATABASE_CLOCK, float(session.connection().execute(_NOW).scalar_one()))


def moment_of(reading: Reading) -> datetime:
    """The reading as a time; the reading of a monotonic clock is not one, so the machine's time is
    used."""
    if reading.clock == DATABASE_CLOCK:
        return datetime.fromtimestamp(reading.seconds, UTC)
    return utc_now()


@cache
def _boot_id() -> str:
    """The machine's boot id; if the kernel has none, an id of this process."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return new_id()
