"""The limit on the tokens that a tenant's fine-tuning jobs train on in a day or month.

They count by the days of the usage, which begin at midnight UTC as the periods do.
"""

from __future__ import annotations

from ..base import utc_now
from ..errors import InsufficientQuota
from ..sessions import TenantSession
from . import repository
from .limits import Limits, get_limits
from .period import begin_of, end_of


def count_trained_tokens(session: TenantSession, limits: Limits) -> int | None:
    """The tokens of the present period; None: they have no limit."""
    if limits.trained_tokens_per_period is None:
        return None
    begin = begin_of(limits.period, utc_now())
    end = end_of(limits.period, begin)
    return repository.sum_trained_tokens(session, begin.date(), end.date())


def may_train(session: TenantSession) -> bool:
    """Whether the tenant has tokens left to train on."""
    limits = get_limits(session)
    used = count_trained_tokens(session, limits)
    return used is None or used < (limits.trained_tokens_per_period or 0)


def check_may_train(session: TenantSession) -> None:
    """Raises InsufficientQuota if the tenant has no tokens left to train on."""
    if may_train(session):
        return
    limits = get_limits(session)
    raise InsufficientQuota(
        f"The limit is {limits.trained_tokens_per_period} trained tokens a {limits.period}, and "
        "none are left.",
        standing={},
    )
