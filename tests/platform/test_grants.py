"""Granting permissions: nobody can grant more than they have."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import combinations, product

import pytest

from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    ApiKeyRevoked,
    GrantTooWide,
    InvalidTransition,
    InvalidValue,
    KeyNotFound,
    QuotaExceeded,
    UserNotFound,
)
from loraplex.platform.keys import repository
from loraplex.platform.keys.principal import (
    SCOPES_OF_ADAPTERS,
    Grant,
    OperatorPrincipal,
    OperatorRole,
    Scope,
    SignedIn,
    TenantRole,
)
from loraplex.platform.keys.service import ApiKeyService, IssuedKey
from loraplex.platform.networks import parse_networks
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.users import service as users
from loraplex.platform.users.models import User
from support.identity import SettableClock, caller_of, peppers
from support.limits import limit

HOUR = timedelta(hours=1)


@pytest.fixture
def keys() -> ApiKeyService:
    return ApiKeyService(peppers("secret"))


def add_user(database: Database, tenant: Tenant, role: TenantRole, name: str = "ada") -> User:
    with database.transaction(tenant.id) as session:
        return users.add_user(session, f"{name}@example.com", role, by=caller_of(tenant))


def subsets(values: set[str]) -> list[frozenset[str]]:
    return [frozenset(part) for size in range(4) for part in combinations(sorted(values), size)]


def test_a_grant_covers_exactly_the_scopes_that_are_its_own() -> None:
    names = {Scope.INFER, Scope.ADAPTERS_READ, Scope.KEYS_MANAGE}
    for own, wanted in product(subsets(set(names)), repeat=2):
        excess = Grant(frozenset(map(Scope, own))).excess(Grant(frozenset(map(Scope, wanted))))
        assert (excess is None) == all(scope in own for scope in wanted)


def test_a_grant_covers_exactly_the_adapters_that_are_its_own() -> None:
    restrictions = [None, *subsets({"a", "b", "c"})[1:]]
    for own, wanted in product(restrictions, repeat=2):
        excess = Grant(frozenset(), adapters=own).excess(Grant(frozenset(), adapters=wanted))
        is_covered = own is None or (wanted is not None and all(name in own for name in wanted))
        assert excess == (None if is_covered else "adapters")


@pytest.mark.parametrize(
    ("own", "wanted", "is_covered"),
    [
        (None, None, True),
        (None, ["10.0.0.0/8"], True),
        (["10.0.0.0/8"], None, False),
        (["10.0.0.0/8"], ["10.0.0.0/8"], True),
        (["10.0.0.0/8"], ["10.1.0.0/16", "10.2.3.4"], True),
        (["10.0.0.0/8"], ["10.1.0.0/16", "11.0.0.0/16"], False),
        (["10.1.0.0/16"], ["10.0.0.0/8"], False),
        (["0.0.0.0/0"], ["::/0"], False),
        (["2001:db8::/32", "10.0.0.0/8"], ["2001:db8:1::/48"], True),
    ],
)
def test_a_grant_covers_the_networks_within_its_own(
    own: list[str] | None, wanted: list[str] | None, is_covered: bool
) -> None:
    grants = [
        Grant(frozenset(), networks=None if nets is None else parse_networks(nets))
        for nets in (own, wanted)
    ]
    assert grants[0].excess(grants[1]) == (None if is_covered else "networks")


NOON = datetime(2040, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("own", "wanted", "is_covered"),
    [
        (None, None, True),
        (None, NOON, True),
        (NOON, None, False),
        (NOON, NOON, True),
        (NOON, NOON - timedelta(seconds=1), True),
        (NOON, NOON + timedelta(microseconds=1), False),
    ],
)
def test_a_grant_covers_what_ends_no_later(
    own: datetime | None, wanted: datetime | None, is_covered: bool
) -> None:
    excess = Grant(frozenset(), expires_at=own).excess(Grant(frozenset(), expires_at=wanted))
    assert excess == (None if is_covered else "expires_at")


MANAGER = frozenset({Scope.KEYS_MANAGE, Scope.INFER})


@pytest.mark.parametrize(
    ("issuer", "wanted", "param"),
    [
        ({"scopes": MANAGER}, {"scopes": [Scope.INFER]}, None),
        ({"scopes": MANAGER}, {"scopes": list(MANAGER)}, None),
        ({"scopes": MANAGER}, {"scopes": [Scope.ADAPTERS_READ]}, "scopes"),
        ({"scopes": MANAGER}, {"scopes": [Scope.INFER, Scope.USERS_MANAGE]}, "scopes"),
        ({"adapters": ["a"], "scopes": MANAGER}, {"scopes": [Scope.INFER]}, "adapters"),
        (
            {"adapters": ["a"], "scopes": MANAGER},
            {"scopes": [Scope.INFER], "adapters": ["a"]},
            None,
        ),
        (
            {"adapters": ["a"], "scopes": MANAGER},
            {"scopes": [Scope.INFER], "adapters": ["a", "b"]},
            "adapters",
        ),
        ({"networks": ["10.0.0.0/8"]}, {"scopes": [Scope.INFER]}, "networks"),
        (
            {"networks": ["10.0.0.0/8"]},
            {"scopes": [Scope.INFER], "networks": ["10.9.0.0/16"]},
            None,
        ),
        ({}, {"scopes": list(Scope)}, None),
    ],
)
def test_nobody_issues_a_key_wider_than_their_own(
    database: Database,
    keys: ApiKeyService,
    acme: Tenant,
    issuer: dict[str, list[str]],
    wanted: dict[str, list[Scope]],
    param: str | None,
) -> None:
    by = caller_of(acme, **issuer)  # type: ignore[arg-type]
    if param is None:
        with database.transaction(acme.id) as session:
            issued = keys.issue(session, name="ci", issuer=by, **wanted)  # type: ignore[arg-type]
        assert by.grant.excess(issued.key.grant) is None
        assert issued.key.created_by == str(by.actor)
        return
    with pytest.raises(GrantTooWide) as caught, database.transaction(acme.id) as session:
        keys.issue(session, name="ci", issuer=by, **wanted)  # type: ignore[arg-type]
    assert caught.value.param == param
    if param == "scopes":
        missing = ", ".join(sorted(set(wanted["scopes"]) - by.scopes))
        assert str(caught.value).endswith(f" Beyond your key: {missing}.")
    with database.transaction(acme.id, read_only=True) as session:
        assert not keys.list_keys(session)


@pytest.mark.parametrize("expires_at", [None, NOON + timedelta(days=1)])
def test_no_key_outlives_the_key_that_issues_it(
    database: Database, keys: ApiKeyService, acme: Tenant, expires_at: datetime | None
) -> None:
    by = caller_of(acme, expires_at=NOON + timedelta(milliseconds=1))
    with (
        pytest.raises(GrantTooWide, match=r"2040-01-01T12:00:00\+00:00\.$") as caught,
        database.transaction(acme.id) as session,
    ):
        keys.issue(session, name="ci", scopes=[], expires_at=expires_at, issuer=by)
    assert caught.value.param == "expires_in_days"
    with database.transaction(acme.id) as session:
        assert keys.issue(session, name="ci", scopes=[], expires_at=NOON, issuer=by)


def test_a_sessions_and_an_operators_end_bind_no_key_of_the_tenants(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    operator = OperatorPrincipal(
        "id", "root", OperatorRole.ADMIN, NOON, networks=parse_networks(["10.0.0.0/8"])
    )
    signed_in = caller_of(acme, expires_at=NOON, key_id=None)
    with database.transaction(acme.id) as session:
        for by in (signed_in, operator.within(acme.id, acme.slug, 1.0)):
            issued = keys.issue(session, name="ci", scopes=[Scope.INFER], issuer=by)
            assert (issued.key.expires_at, issued.key.networks) == (None, None)


def test_rotating_makes_no_key_outlive_another_that_does_it_and_renews_ones_own(
    database: Database, acme: Tenant
) -> None:
    clock = SettableClock(utc_now())
    keys = ApiKeyService(peppers("secret"), clock=clock)
    with database.transaction(acme.id) as session:
        ends = {"days": clock.now + timedelta(days=30), "never": None}
        issued = {
            name: keys.issue(session, name=name, scopes=list(Scope), expires_at=end)
            for name, end in ends.items()
        }
    clock.now += timedelta(days=10)
    with database.platform_transaction(read_only=True) as session:
        ending = keys.authenticate(session, issued["days"].text).principal
    for key_id in (issued["never"].key.id, _other(database, keys, acme, clock.now)):
        with pytest.raises(GrantTooWide), database.transaction(acme.id) as session:
            keys.rotate(session, key_id, overlap=HOUR, issuer=ending)
    with database.transaction(acme.id) as session:
        renewed = keys.rotate(session, issued["days"].key.id, overlap=HOUR, issuer=ending).key
    assert renewed.expires_at == clock.now + timedelta(days=30)


def _other(database: Database, keys: ApiKeyService, tenant: Tenant, now: datetime) -> str:
    """The id of a key that ends in 30 days."""
    with database.transaction(tenant.id) as session:
        end = now + timedelta(days=30)
        return keys.issue(session, name="other", scopes=[], expires_at=end).key.id


def test_a_role_is_given_by_a_key_that_ends(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        by = caller_of(acme, expires_at=NOON, networks=["10.0.0.0/8"])
        assert users.add_user(session, "eve@example.com", TenantRole.OWNER, by=by)


@pytest.mark.parametrize("scope", list(Scope))
def test_a_key_restricted_to_adapters_has_no_scope_that_shows_others(
    database: Database, keys: ApiKeyService, acme: Tenant, scope: Scope
) -> None:
    def issue() -> IssuedKey:
        with database.transaction(acme.id) as session:
            return keys.issue(session, name="ci", scopes=[scope], adapters=["a"])

    if scope in SCOPES_OF_ADAPTERS:
        assert issue().key.grant.adapters == frozenset({"a"})
    else:
        with pytest.raises(InvalidValue, match="restricted to adapters"):
            issue()


def test_a_key_restricted_to_adapters_has_all_scopes_that_show_no_others(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        key = keys.issue(session, name="ci", scopes=SCOPES_OF_ADAPTERS, adapters=["a"]).key
    assert key.grant.scopes == SCOPES_OF_ADAPTERS


@pytest.mark.parametrize(
    ("adapters", "networks", "param"),
    [
        ([], None, "adapters"),
        (["Not A Name"], None, "adapters"),
        (None, [], "networks"),
        (None, ["10.0.0.1/8"], "networks"),
        (None, ["nowhere"], "networks"),
    ],
)
def test_refuses_a_restriction_that_is_none(
    database: Database,
    keys: ApiKeyService,
    acme: Tenant,
    adapters: list[str] | None,
    networks: list[str] | None,
    param: str,
) -> None:
    with pytest.raises(InvalidValue) as caught, database.transaction(acme.id) as session:
        keys.issue(session, name="ci", scopes=[Scope.INFER], adapters=adapters, networks=networks)
    assert caught.value.param == param


@pytest.mark.parametrize(("role", "scope"), list(product(TenantRole, Scope)))
def test_a_users_key_is_bounded_by_the_users_role(
    database: Database, keys: ApiKeyService, acme: Tenant, role: TenantRole, scope: Scope
) -> None:
    user = add_user(database, acme, role)
    with database.transaction(acme.id) as session:
        if scope in role.scopes:
            assert keys.issue(session, name="ci", scopes=[scope], user_id=user.id)
        else:
            with pytest.raises(GrantTooWide):
                keys.issue(session, name="ci", scopes=[scope], user_id=user.id)


def test_a_users_key_follows_the_role_and_dies_with_the_user(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    user = add_user(database, acme, TenantRole.DEVELOPER)
    everything = caller_of(acme)
    with database.transaction(acme.id) as session:
        text = keys.issue(
            session, name="ci", scopes=[Scope.INFER, Scope.USAGE_READ], user_id=user.id
        ).text

    def scopes() -> frozenset[Scope]:
        with database.platform_transaction(read_only=True) as session:
            principal = keys.authenticate(session, text).principal
        assert (principal.actor.id, principal.actor.name) == (user.id, user.email)
        return principal.scopes

    assert scopes() == {Scope.INFER, Scope.USAGE_READ}
    with database.transaction(acme.id) as session:
        users.change_role(session, user.id, TenantRole.VIEWER, by=everything)
    assert scopes() == {Scope.USAGE_READ}
    with database.transaction(acme.id) as session:
        users.disable_user(session, user.id, by=everything)
    with pytest.raises(ApiKeyRevoked):  # by the user alone, before its keys are revoked
        scopes()
    with database.transaction(acme.id) as session:
        assert keys.revoke_keys_of_user(session, user.id) == 1
        users.enable_user(session, user.id, by=everything)
    with pytest.raises(ApiKeyRevoked):
        scopes()


def test_no_key_is_issued_to_a_disabled_or_foreign_user(
    database: Database, keys: ApiKeyService, acme: Tenant, bolt: Tenant
) -> None:
    disabled = add_user(database, acme, TenantRole.VIEWER)
    foreign = add_user(database, bolt, TenantRole.VIEWER)
    with database.transaction(acme.id) as session:
        users.disable_user(session, disabled.id, by=caller_of(acme))
    for user_id in (disabled.id, foreign.id, "no-such-user"):
        with pytest.raises(UserNotFound), database.transaction(acme.id) as session:
            keys.issue(session, name="ci", scopes=[], user_id=user_id)


def test_whoever_is_restricted_sees_and_ends_only_such_keys(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        issued = {
            label: keys.issue(session, name=label, scopes=[Scope.INFER], adapters=adapters).key.id
            for label, adapters in {
                "a": ["a"],
                "b": ["b"],
                "ab": ["a", "b"],
                "abc": ["a", "b", "c"],
                "all": None,
            }.items()
        }
    viewer = caller_of(acme, SCOPES_OF_ADAPTERS, adapters=["a", "b"])
    with database.transaction(acme.id) as session:
        seen = {key.name for key in keys.list_keys(session, viewer=viewer)}
        assert seen == {"a", "b", "ab"}
        for label, key_id in issued.items():
            if label in seen:
                assert keys.revoke(session, key_id, viewer=viewer).revoked_at
                continue
            for act in (keys.get, keys.revoke):
                with pytest.raises(KeyNotFound):
                    act(session, key_id, viewer=viewer)
            with pytest.raises(KeyNotFound):
                keys.rotate(session, key_id, overlap=HOUR, issuer=viewer)


def test_whoever_is_restricted_gets_whole_pages_of_what_they_see(
    database: Database, acme: Tenant
) -> None:
    clock = SettableClock(utc_now())
    keys = ApiKeyService(peppers("secret"), clock=clock)
    restrictions = (None, ["c"], ["a"], None, ["a", "b"], ["c"], ["b"], ["a", "c"], ["b"], None)
    with database.transaction(acme.id) as session:
        for number, adapters in enumerate(restrictions):
            clock.now += HOUR
            keys.issue(session, name=str(number), scopes=[Scope.INFER], adapters=adapters)
    viewer = caller_of(acme, SCOPES_OF_ADAPTERS, adapters=["a", "b"])
    pages, after = [], None
    with database.transaction(acme.id, read_only=True) as session:
        while page := keys.list_keys(session, after=after, limit=3, viewer=viewer):
            pages.append([key.name for key in page])
            after = page[-1].id
    assert pages == [["2", "4", "6"], ["8"]]


def test_rotating_on_and_on_makes_no_more_keys_than_are_allowed(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    limit(database, acme.id, keys=2)
    issuer = caller_of(acme)
    with database.transaction(acme.id) as session:
        first, second = (keys.issue(session, name="ci", scopes=[Scope.INFER]) for _ in range(2))
        new = keys.rotate(session, first.key.id, overlap=HOUR, issuer=issuer)
        keys.rotate(session, second.key.id, overlap=HOUR, issuer=issuer)
        with pytest.raises(QuotaExceeded, match="2 keys: 4 are used"):
            keys.rotate(session, new.key.id, overlap=HOUR, issuer=issuer)
        newest = keys.rotate(session, new.key.id, overlap=timedelta(), issuer=issuer)
        keys.revoke(session, first.key.id)
        keys.rotate(session, newest.key.id, overlap=HOUR, issuer=issuer)


def test_nobody_gets_hold_of_a_wider_key_by_rotating_it(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        wide = keys.issue(session, name="owner's", scopes=list(Scope)).key.id
        with pytest.raises(GrantTooWide):
            keys.rotate(session, wide, overlap=HOUR, issuer=caller_of(acme, MANAGER))


def test_a_successor_may_do_the_same_for_as_long_and_the_old_key_ends_after_the_overlap(
    database: Database, acme: Tenant
) -> None:
    clock = SettableClock(utc_now())
    keys = ApiKeyService(peppers("secret"), clock=clock)
    issuer = caller_of(acme)
    born = clock.now
    with database.transaction(acme.id) as session:
        old = keys.issue(
            session,
            name="ci",
            scopes=[Scope.INFER],
            adapters=["a"],
            networks=["10.0.0.0/8"],
            expires_at=born + timedelta(days=30),
        )
    clock.now = born + timedelta(days=10)
    with database.transaction(acme.id) as session:
        new = keys.rotate(session, old.key.id, overlap=HOUR, issuer=issuer)
    assert replace(new.key.grant, expires_at=old.key.grant.expires_at) == old.key.grant
    assert new.key.expires_at == clock.now + timedelta(days=30)
    for _ in range(2):  # at the end of the overlap only the new one is left
        with database.platform_transaction(read_only=True) as session:
            assert keys.authenticate(session, new.text)
            if clock.now < born + timedelta(days=10) + HOUR:
                assert keys.authenticate(session, old.text)
            else:
                with pytest.raises(Exception, match="expired"):
                    keys.authenticate(session, old.text)
        clock.now = born + timedelta(days=10) + HOUR
    with pytest.raises(InvalidTransition), database.transaction(acme.id) as session:
        keys.rotate(session, old.key.id, overlap=HOUR, issuer=issuer)


def test_no_overlap_makes_a_key_live_longer(database: Database, acme: Tenant) -> None:
    keys = ApiKeyService(peppers("secret"))
    soon = utc_now() + timedelta(minutes=5)
    with database.transaction(acme.id) as session:
        old = keys.issue(session, name="ci", scopes=[], expires_at=soon).key
        keys.rotate(session, old.id, overlap=HOUR, issuer=caller_of(acme))
        assert keys.get(session, old.id).expires_at == soon
        with pytest.raises(InvalidTransition):
            keys.rotate(session, old.id, overlap=HOUR, issuer=caller_of(acme))
        revoked = keys.issue(session, name="ci", scopes=[]).key
        keys.revoke(session, revoked.id)
        with pytest.raises(InvalidTransition):
            keys.rotate(session, revoked.id, overlap=HOUR, issuer=caller_of(acme))


@pytest.mark.parametrize("role", list(OperatorRole))
def test_an_operator_has_the_scopes_of_its_role_in_every_tenant(role: OperatorRole) -> None:
    signed_in = SignedIn("id", role, expires_at=utc_now(), confirmed_until=None)
    operator = OperatorPrincipal("id", "root", role, signed_in.expires_at, signed_in)
    within = operator.within("tenant", "acme", 2.5)
    assert (within.tenant_weight, within.operator_role) == (2.5, role)
    assert (within.expires_at, within.signed_in) == (operator.expires_at, signed_in)
    assert within.scopes == role.scopes
    assert (within.actor, within.key_id, within.adapters) == (operator.actor, None, None)
    assert within.can(Scope.KEYS_MANAGE) is (role is OperatorRole.ADMIN)
    assert within.can(Scope.INFER) is (role is OperatorRole.ADMIN)


def test_counts_the_keys_that_end_soon_without_a_successor(
    database: Database, keys: ApiKeyService, acme: Tenant, bolt: Tenant
) -> None:
    now = utc_now()
    with database.transaction(acme.id) as session:
        for days in (1, 3, 30, None):
            expires_at = None if days is None else now + timedelta(days=days)
            key = keys.issue(session, name="ci", scopes=[], expires_at=expires_at).key
            if days == 3:
                keys.rotate(session, key.id, overlap=HOUR, issuer=caller_of(acme))
    with database.transaction(bolt.id) as session:
        soon = now + timedelta(days=2)
        keys.issue(session, name="ci", scopes=[], expires_at=soon)
        keys.revoke(session, keys.issue(session, name="ci", scopes=[], expires_at=soon).key.id)
        keys.issue(session, name="ci", scopes=[], expires_at=now)
    with database.platform_transaction(read_only=True) as session:
        # The first, the rotated one's successor, and bolt's.
        until = now + timedelta(days=7)
        assert repository.count_ending_in_all_tenants(session, now, until) == 3
        assert repository.count_ending_in_all_tenants(session, now, soon) == 2
        assert repository.count_ending_in_all_tenants(session, now, now) == 0
