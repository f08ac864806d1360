"""Limits of tenants in tests, and a clock that the test sets."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.platform.database import Database
from loraplex.platform.quotas import service as quotas
from loraplex.platform.quotas.bucket import Reading
from loraplex.platform.quotas.service import Demand, Limits
from loraplex.platform.sessions import Transaction

SERVER_ID = "11111111-1111-4111-8111-111111111111"


@dataclass
class SetClock:
    """Shows what it is set to."""

    seconds: float = 1000.0
    name: str = "set by the test"

    def __call__(self, session: Transaction) -> Reading:
        return Reading(self.name, self.seconds)


def limit(database: Database, tenant_id: str, **limits: object) -> None:
    """Set the tenant's limits to these alone."""
    with database.transaction(tenant_id) as session:
        quotas.set_limits(session, Limits(**limits))  # type: ignore[arg-type]


def make_demand(
    request_id: str = "req-1", *, input_tokens: int = 10, output_tokens: int = 20
) -> Demand:
    """What a request to the base model may use."""
    return Demand(
        request_id=request_id,
        key_id=None,
        adapter=None,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
    )
