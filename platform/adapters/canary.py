"""Selects the requests that a canary answers.

Every request has a value in [0, 100) that depends only on the adapter, the alias and the request's
id. The canary answers the requests whose value is below its percentage. So an id always gets the
same version, and a request in the canary stays in it when the percentage grows.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

from ..errors import InvalidValue
from .canary_limits import CanaryLimits

_PERSON = b"loraplex canary"
_PLACE_BITS = 53
"""The precision of a float, so that the value never rounds up to 100."""


class Canary(NamedTuple):
    """A second version of an alias, and its percentage of the requests."""

    number: int
    percent: float
    """Between 0 and 100, both excluded."""
    limits: CanaryLimits | None = None
    """Beyond these it ends by itself; None: it is not watched."""


def check_canary(canary: Canary, main_number: int) -> Canary:
    """Return the canary of an alias for `main_number`, or raise InvalidValue."""
    if not (math.isfinite(canary.percent) and 0 < canary.percent < 100):
        raise InvalidValue(
            "The canary's percent must be between 0 and 100.", param="canary.percent"
        )
    if canary.number == main_number:
        raise InvalidValue(
            "The canary must be another version than the alias's own.", param="canary.version"
        )
    return canary


def is_in_canary(percent: float, *, adapter_id: str, alias: str, request_id: str) -> bool:
    """Whether the canary with this share of the alias's requests answers this one."""
    return request_place(adapter_id, alias, request_id) < percent


def request_place(adapter_id: str, alias: str, request_id: str) -> float:
    """The request's value, uniform in [0, 100)."""
    hasher = hashlib.blake2b(digest_size=8, person=_PERSON)
    for tag, value in ((b"adapter", adapter_id), (b"alias", alias), (b"request", request_id)):
        for field in (tag, value.encode()):
            hasher.update(len(field).to_bytes(8, "little"))
            hasher.update(field)
    bits = int.from_bytes(hasher.digest(), "little") >> (64 - _PLACE_BITS)
    return 100.0 * math.ldexp(bits, -_PLACE_BITS)
