"""The quota service: the functions that callers use.

Requests are reserved before they run and settled when they have ended. Before a resource is added,
its limit is checked.
"""

from __future__ import annotations

from .held import LEASE_SECONDS, Demand, HeldLimits, Used, hold
from .limits import NO_LIMITS, Limits, get_limits, lock_limits, set_limits
from .reservations import list_of_server, purge, release, renew, reserve, settle
from .resources import (
    Resource,
    check_room,
    check_room_for_content,
    check_room_for_successor,
    check_room_for_upload,
    check_room_for_version,
    count,
)
from .standing import RateStanding, Standing, tightest_token_rate
from .training import check_may_train, may_train
from .use import LimitUse, QuotaUse, current_use

__all__ = [
    "LEASE_SECONDS",
    "NO_LIMITS",
    "Demand",
    "HeldLimits",
    "LimitUse",
    "Limits",
    "QuotaUse",
    "RateStanding",
    "Resource",
    "Standing",
    "Used",
    "check_may_train",
    "check_room",
    "check_room_for_content",
    "check_room_for_successor",
    "check_room_for_upload",
    "check_room_for_version",
    "count",
    "current_use",
    "get_limits",
    "hold",
    "list_of_server",
    "lock_limits",
    "may_train",
    "purge",
    "release",
    "renew",
    "reserve",
    "set_limits",
    "settle",
    "tightest_token_rate",
]
