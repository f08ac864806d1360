"""Operators: creating, changing, disabling and authenticating."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier

import pytest
from sqlalchemy import update

from loraplex.platform.audit.event import Party
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    ApiKeyExpired,
    ApiKeyRevoked,
    GrantTooWide,
    InvalidApiKey,
    InvalidTransition,
    InvalidValue,
    KeyNotFound,
    LastAdministrator,
    OperatorExists,
    OperatorNotFound,
    OwnAccount,
)
from loraplex.platform.keys.principal import SYSTEM, Actor, ActorKind, OperatorRole
from loraplex.platform.keys.service import ApiKeyService
from loraplex.platform.keys.token import OPERATOR_PREFIX, make_token
from loraplex.platform.networks import parse_networks
from loraplex.platform.operators import repository
from loraplex.platform.operators.models import Operator
from loraplex.platform.operators.service import DEFAULT_LIFETIME, OperatorService
from loraplex.platform.tenants.models import Tenant
from support.identity import SettableClock, peppers

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
ADMIN, VIEWER = OperatorRole


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock(NOON)


@pytest.fixture
def operators(clock: SettableClock) -> OperatorService:
    return OperatorService(peppers("secret"), clock=clock)


def make(
    database: Database, operators: OperatorService, name: str, role: OperatorRole = ADMIN
) -> tuple[Actor, str]:
    """An operator, and the text of its key."""
    with database.platform_transaction() as session:
        operator = operators.create(session, name, role)
        text = operators.issue_key(session, operator, name="test").text
    return Actor(ActorKind.OPERATOR, operator.id, operator.name), text


def authenticate(database: Database, operators: OperatorService, text: str) -> str:
    with database.platform_transaction(read_only=True) as session:
        return operators.authenticate(session, text).principal.name


def test_an_operators_key_tells_who_calls_for_its_lifetime(
    database: Database, operators: OperatorService, clock: SettableClock
) -> None:
    _, text = make(database, operators, "root")
    with database.platform_transaction(read_only=True) as session:
        root = operators.authenticate(session, text).principal
    assert (root.name, root.expires_at) == ("root", NOON + timedelta(days=90))
    clock.now = NOON + DEFAULT_LIFETIME - timedelta(seconds=1)
    assert authenticate(database, operators, text) == "root"
    clock.now = NOON + DEFAULT_LIFETIME
    with pytest.raises(ApiKeyExpired):
        authenticate(database, operators, text)


def test_the_use_of_an_operators_key_is_noted_and_moves_it_to_the_present_pepper(
    database: Database, operators: OperatorService, clock: SettableClock
) -> None:
    _, text = make(database, operators, "root")
    both = OperatorService(peppers("new", "secret"), clock=SettableClock(NOON))
    clock.now += timedelta(seconds=1)
    with database.platform_transaction() as session:
        key = operators.issue_key(session, operators.get(session, "root"), name="revoked").key
        operators.revoke_key(session, "root", key.id)
    for is_due in (True, False):
        with database.platform_transaction() as session:
            assert both.authenticate(session, text).is_use_to_be_noted is is_due
            both.note_use(session, text)
    with database.platform_transaction(read_only=True) as session:
        key, revoked = both.list_keys(session, "root")
        assert (key.last_used_at, revoked.last_used_at) == (NOON, None)
        assert repository.count_by_secret(session) == {peppers("new").current_id: 1}
        assert OperatorService(peppers("new"), clock=clock).authenticate(session, text)


def test_an_operators_key_with_another_secret_is_refused_and_its_use_not_noted(
    database: Database, operators: OperatorService
) -> None:
    """As is a key that nobody has."""
    _, text = make(database, operators, "root")
    with database.platform_transaction() as session:
        (key,) = operators.list_keys(session, "root")
        key.mac = bytes(32)
    for refused in (text, make_token(OPERATOR_PREFIX).text):
        with pytest.raises(InvalidApiKey) as caught:
            authenticate(database, operators, refused)
        assert type(caught.value) is InvalidApiKey
        with database.platform_transaction() as session:
            operators.note_use(session, refused)
    with database.platform_transaction(read_only=True) as session:
        (key,) = operators.list_keys(session, "root")
        assert (key.mac, key.last_used_at) == (bytes(32), None)


def test_counts_the_keys_of_active_operators_that_end_soon(
    database: Database, operators: OperatorService
) -> None:
    for name in ("root", "eve", "mallory"):
        make(database, operators, name)
    with database.platform_transaction() as session:
        root = operators.get(session, "root")
        for days in (30, None):
            lifetime = None if days is None else timedelta(days=days)
            operators.issue_key(session, root, name="x", lifetime=lifetime)
        (key,) = operators.list_keys(session, "eve")
        operators.revoke_key(session, "eve", key.id)
        operators.get(session, "mallory").disabled_at = NOON
    with database.platform_transaction(read_only=True) as session:
        end = NOON + DEFAULT_LIFETIME
        assert repository.count_ending(session, NOON, end) == 2
        assert repository.count_ending(session, NOON, end - timedelta(seconds=1)) == 1
        assert repository.count_ending(session, NOON + timedelta(days=30), end) == 1
        assert repository.count_ending(session, NOON, NOON) == 0


def test_an_operators_key_is_no_tenants_and_a_tenants_no_operators(
    database: Database, operators: OperatorService, acme: Tenant
) -> None:
    _, operators_text = make(database, operators, "root")
    keys = ApiKeyService(peppers("secret"))
    with database.transaction(acme.id) as session:
        tenants_text = keys.issue(session, name="ci", scopes=[]).text
    with database.platform_transaction(read_only=True) as session:
        with pytest.raises(InvalidApiKey):
            keys.authenticate(session, operators_text)
        with pytest.raises(InvalidApiKey):
            operators.authenticate(session, tenants_text)


def test_names_are_names_and_taken_once(database: Database, operators: OperatorService) -> None:
    make(database, operators, "root")
    with database.platform_transaction() as session:
        with pytest.raises(OperatorExists):
            operators.create(session, "root", VIEWER)
        with pytest.raises(InvalidValue):
            operators.create(session, "../root", VIEWER)
        assert [operator.name for operator in operators.list_operators(session)] == ["root"]


def test_operators_are_listed_by_name_and_in_pages(
    database: Database, operators: OperatorService, clock: SettableClock
) -> None:
    for name in ("root", "ada", "eve"):
        make(database, operators, name)
        clock.now += timedelta(hours=1)
    with database.platform_transaction(read_only=True) as session:
        listed = [
            (operator.name, operator.created_at) for operator in operators.list_operators(session)
        ]
        first = operators.list_operators(session, limit=2)
        rest = operators.list_operators(session, after="eve", limit=2)
        (key,) = operators.list_keys(session, "ada")
    hour = timedelta(hours=1)
    assert listed == [("ada", NOON + hour), ("eve", NOON + 2 * hour), ("root", NOON)]
    assert [operator.name for operator in first] == ["ada", "eve"]
    assert [operator.name for operator in rest] == ["root"]
    assert key.created_at == NOON + hour


def test_an_operator_is_changed_as_the_database_has_it_now(
    database: Database, operators: OperatorService
) -> None:
    make(database, operators, "root")
    with database.platform_transaction() as session:
        known = operators.get(session, "root")
        session.execute(
            update(Operator).values(role=VIEWER), execution_options={"synchronize_session": False}
        )
        assert known.role is ADMIN
        assert operators.get_to_change(session, "root").role is VIEWER


def test_nobody_changes_themselves_and_the_last_administrator_stays(
    database: Database, operators: OperatorService
) -> None:
    root, _ = make(database, operators, "root")
    make(database, operators, "eve", VIEWER)
    with database.platform_transaction() as session:
        with pytest.raises(OwnAccount):
            operators.change_role(session, "root", VIEWER, by=root)
        with pytest.raises(OwnAccount):
            operators.disable(session, "root", by=root)
        with pytest.raises(LastAdministrator):
            operators.disable(session, "root", by=SYSTEM)
        operators.change_role(session, "root", ADMIN, by=root)
        operators.change_role(session, "eve", ADMIN, by=root)
        assert operators.disable(session, "root", by=SYSTEM).disabled_at == NOON


def test_an_operator_who_is_disabled_again_has_been_so_since_the_first_time(
    database: Database, operators: OperatorService, clock: SettableClock
) -> None:
    make(database, operators, "root")
    eve, _ = make(database, operators, "eve")
    for by in (SYSTEM, eve):
        with database.platform_transaction() as session:
            assert operators.disable(session, "eve", by=by).disabled_at == NOON
        clock.now += timedelta(hours=1)


def test_of_two_administrators_who_disable_each_other_one_stays(
    database: Database, operators: OperatorService
) -> None:
    actors = [make(database, operators, name)[0] for name in ("ada", "bob")]
    barrier = Barrier(2)

    def disable(actor: Actor, other: Actor) -> bool:
        barrier.wait()
        try:
            with database.platform_transaction() as session:
                operators.disable(session, other.name, by=actor)
        except LastAdministrator:
            return False
        return True

    with ThreadPoolExecutor(2) as threads:
        done = list(threads.map(disable, actors, reversed(actors)))
    assert sorted(done) == [False, True]


def test_the_keys_of_a_disabled_operator_are_gone_for_good(
    database: Database, operators: OperatorService
) -> None:
    make(database, operators, "root")
    _, text = make(database, operators, "eve")
    with database.platform_transaction() as session:
        eve = operators.disable(session, "eve", by=SYSTEM)
        with pytest.raises(InvalidTransition):
            operators.issue_key(session, eve, name="again")
    with database.platform_transaction() as session:
        operators.enable(session, "eve")
    with pytest.raises(ApiKeyRevoked):
        authenticate(database, operators, text)


def test_no_key_of_a_disabled_operator_is_good(
    database: Database, operators: OperatorService
) -> None:
    eve, text = make(database, operators, "eve")
    with database.platform_transaction() as session:
        operators.get(session, "eve").disabled_at = NOON
    with pytest.raises(ApiKeyRevoked) as caught:
        authenticate(database, operators, text)
    assert caught.value.refused == Party(None, eve)


def test_revokes_a_key_of_the_operator_that_is_named(
    database: Database, operators: OperatorService, clock: SettableClock
) -> None:
    _, text = make(database, operators, "root")
    make(database, operators, "eve")
    with database.platform_transaction() as session:
        (key,) = operators.list_keys(session, "root")
        with pytest.raises(KeyNotFound):
            operators.revoke_key(session, "eve", key.id)
        with pytest.raises(OperatorNotFound):
            operators.revoke_key(session, "nobody", key.id)
    assert authenticate(database, operators, text) == "root"
    with database.platform_transaction() as session:
        assert operators.revoke_key(session, "root", key.id).revoked_at == NOON
        clock.now += timedelta(hours=1)
        assert operators.revoke_key(session, "root", key.id).revoked_at == NOON
    with pytest.raises(ApiKeyRevoked):
        authenticate(database, operators, text)


def test_an_operators_key_is_for_its_networks_and_those_it_issues_within_them(
    database: Database, operators: OperatorService
) -> None:
    make(database, operators, "root")
    with database.platform_transaction() as session:
        root = operators.get(session, "root")
        text = operators.issue_key(session, root, name="x", networks=["10.0.0.0/8", "::1"]).text
    with database.platform_transaction() as session:
        issuer = operators.authenticate(session, text).principal
        assert issuer.networks == parse_networks(["10.0.0.0/8", "::1"])
        within = issuer.within("tenant", "acme", 1.0)
        assert within.networks == issuer.networks
        wider: list[list[str] | None] = [None, ["11.0.0.0/8"], ["10.1.0.0/16", "0.0.0.0/0"]]
        for networks in wider:
            with pytest.raises(GrantTooWide) as caught:
                operators.issue_key(session, root, name="y", networks=networks, issuer=issuer)
            assert caught.value.param == "networks"
        for nowhere in ([], ["10.0.0.1/8"]):
            with pytest.raises(InvalidValue):
                operators.issue_key(session, root, name="y", networks=nowhere)
        issued = operators.issue_key(
            session, root, name="y", networks=["10.1.0.0/16"], lifetime=None, issuer=issuer
        )
        assert issued.key.networks == ["10.1.0.0/16"]
