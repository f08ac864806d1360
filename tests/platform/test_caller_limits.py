"""Limits of users and keys, besides those of their tenant, on both databases."""

from __future__ import annotations

import pytest

from loraplex.platform.database import Database
from loraplex.platform.errors import InvalidValue, LimitReached, RateLimited, TooManyRequestsAtOnce
from loraplex.platform.quotas import service as quotas
from loraplex.platform.quotas.caller_limits import (
    CallerLimitSet,
    copy_caller_limits,
    get_caller_limits,
    set_caller_limits,
)
from loraplex.platform.quotas.holder import Holder, key_holder, user_holder
from loraplex.platform.quotas.limits import restrict_requests
from loraplex.platform.quotas.service import Demand, Used
from loraplex.platform.tenants.models import Tenant
from support.limits import SERVER_ID, SetClock, limit

USER, KEY = user_holder("u"), key_holder("k")


class Gate:
    """One tenant's requests of the user `u` with the key `k`, unless the test says otherwise."""

    def __init__(self, database: Database, tenant: Tenant) -> None:
        self.database = database
        self.tenant_id = tenant.id
        self.clock = SetClock()

    def set(self, holder: Holder, **limits: int) -> None:
        with self.database.transaction(self.tenant_id) as session:
            set_caller_limits(session, holder, CallerLimitSet(**limits))

    def reserve(
        self,
        request_id: str,
        *,
        input_tokens: int = 1,
        output_tokens: int = 1,
        user: str | None = "u",
        key: str | None = "k",
    ) -> None:
        demand = Demand(
            request_id=request_id,
            key_id=key,
            user_id=user,
            adapter=None,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
        )
        with self.database.statements(self.tenant_id) as session:
            quotas.reserve(session, demand, server_id=SERVER_ID, clock=self.clock)

    def settle(self, request_id: str, prompt: int = 0, completion: int = 0) -> None:
        used = Used(request_id=request_id, prompt_tokens=prompt, completion_tokens=completion)
        with (
            self.database.statements(self.tenant_id) as session,
            quotas.hold(session, clock=self.clock) as held,
        ):
            held.settle([used])

    def is_limited(self) -> bool:
        with self.database.platform_transaction(read_only=True) as session:
            return restrict_requests(session, self.tenant_id)


@pytest.fixture
def gate(database: Database, acme: Tenant) -> Gate:
    return Gate(database, acme)


@pytest.mark.parametrize(("holder", "whose"), [(USER, "The user's"), (KEY, "The key's")])
def test_requests_per_minute(gate: Gate, holder: Holder, whose: str) -> None:
    gate.set(holder, requests_per_minute=2)
    gate.reserve("a")
    gate.reserve("b")
    with pytest.raises(RateLimited, match=f"{whose} limit is 2 requests per minute") as refused:
        gate.reserve("c")
    assert refused.value.retry_after_seconds == pytest.approx(30)
    gate.reserve("other", user="v", key="l")
    gate.clock.seconds += 30
    gate.reserve("c")


def test_tokens_per_minute_are_refunded_if_they_are_not_used(gate: Gate) -> None:
    gate.set(KEY, input_tokens_per_minute=100, output_tokens_per_minute=50)
    gate.reserve("a", input_tokens=60, output_tokens=40)
    with pytest.raises(RateLimited, match="50 output tokens"):
        gate.reserve("b", input_tokens=10, output_tokens=30)
    gate.settle("a", prompt=60, completion=5)
    gate.reserve("b", input_tokens=40, output_tokens=45)
    with pytest.raises(RateLimited, match="100 input tokens"):
        gate.reserve("c", input_tokens=1, output_tokens=0)


@pytest.mark.parametrize("holder", [USER, KEY])
def test_concurrent_requests(gate: Gate, holder: Holder) -> None:
    gate.set(holder, concurrent_requests=2)
    gate.reserve("a")
    gate.reserve("b")
    with pytest.raises(TooManyRequestsAtOnce, match="limit is 2 requests at once, and 2 run"):
        gate.reserve("c")
    gate.reserve("other", user="v", key="l")
    gate.settle("a")
    gate.reserve("c")


def test_a_user_limit_holds_over_all_its_keys(gate: Gate) -> None:
    gate.set(USER, concurrent_requests=1)
    gate.reserve("a", key="k")
    with pytest.raises(TooManyRequestsAtOnce):
        gate.reserve("b", key="another")


def test_a_refusal_takes_nothing_of_any_limit(gate: Gate) -> None:
    limit(gate.database, gate.tenant_id, requests_per_minute=2)
    gate.set(USER, requests_per_minute=10)
    gate.set(KEY, requests_per_minute=1)
    gate.reserve("a")
    for number in range(5):
        with pytest.raises(RateLimited, match="The key's"):
            gate.reserve(f"refused-{number}")
    gate.reserve("b", key="another")
    with pytest.raises(RateLimited, match=r"^The limit is 2"):
        gate.reserve("c", key="another")


def test_limits_are_replaced_and_removed(gate: Gate) -> None:
    gate.set(KEY, requests_per_minute=1, concurrent_requests=3)
    gate.set(KEY, requests_per_minute=5)
    with gate.database.transaction(gate.tenant_id, read_only=True) as session:
        assert get_caller_limits(session, KEY) == CallerLimitSet(requests_per_minute=5)
    assert gate.is_limited()
    gate.set(KEY)
    assert not gate.is_limited()


def test_a_successor_has_the_limits_of_its_key(gate: Gate) -> None:
    gate.set(KEY, concurrent_requests=1)
    with gate.database.transaction(gate.tenant_id) as session:
        copy_caller_limits(session, KEY, key_holder("new"))
    gate.reserve("a", key="new", user=None)
    with pytest.raises(LimitReached):
        gate.reserve("b", key="new", user=None)


@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_refuses_what_is_no_limit(gate: Gate, value: int) -> None:
    with pytest.raises(InvalidValue) as refused:
        gate.set(KEY, concurrent_requests=value)
    assert refused.value.param == "concurrent_requests"
