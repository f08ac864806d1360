"""Adding users, changing their roles and disabling them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from threading import Barrier

import pytest
from sqlalchemy.orm.attributes import set_committed_value

from loraplex.platform.database import Database
from loraplex.platform.errors import (
    GrantTooWide,
    InvalidValue,
    LastAdministrator,
    OwnAccount,
    QuotaExceeded,
    UserExists,
    UserNotFound,
)
from loraplex.platform.keys.principal import Principal, Scope, TenantRole
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.users import service as users
from loraplex.platform.users.models import User
from support.identity import caller_of
from support.limits import limit

OWNER, DEVELOPER, VIEWER = TenantRole
Act = Callable[[TenantSession], User]


def add(database: Database, tenant: Tenant, name: str, role: TenantRole) -> User:
    with database.transaction(tenant.id) as session:
        return users.add_user(session, f"{name}@example.com", role, by=caller_of(tenant))


def test_lists_by_address_in_pages_and_by_filter(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    for name, role in (("cyd", VIEWER), ("ada", OWNER), ("bob", VIEWER)):
        add(database, acme, name, role)
    add(database, bolt, "eve", OWNER)
    with database.transaction(acme.id, read_only=True) as session:

        def names(**query: object) -> list[str]:
            found = users.list_users(session, **query)  # type: ignore[arg-type]
            return [user.email.partition("@")[0] for user in found]

        assert names() == ["ada", "bob", "cyd"]
        assert names(limit=2) == ["ada", "bob"]
        assert names(after="bob@example.com") == ["cyd"]
        assert names(role=VIEWER) == ["bob", "cyd"]
        assert names(email="ADA@example.com") == ["ada"]
        assert names(is_disabled=True) == []


def test_finds_the_user_of_the_id_as_the_database_has_it_now(
    database: Database, acme: Tenant
) -> None:
    ada, bob = (add(database, acme, name, VIEWER) for name in ("ada", "bob"))
    for find in (
        users.get_user,
        users.get_user_to_change,
        users.hold_user,
        users.hold_active_user,
    ):
        with database.transaction(acme.id) as session:
            found = [find(session, user.id) for user in (ada, bob)]
            assert [user.email for user in found] == ["ada@example.com", "bob@example.com"]
            set_committed_value(found[0], "role", OWNER)
            assert find(session, ada.id).role is VIEWER


def test_a_tenant_has_no_more_users_than_are_allowed(database: Database, acme: Tenant) -> None:
    limit(database, acme.id, users=1)
    ada = add(database, acme, "ada", OWNER)
    with pytest.raises(QuotaExceeded):
        add(database, acme, "bob", VIEWER)
    with database.transaction(acme.id) as session:  # takes no second place
        assert users.enable_user(session, ada.id, by=caller_of(acme)).disabled_at is None


def test_a_user_who_is_disabled_again_has_been_so_since_the_first_time(
    database: Database, acme: Tenant
) -> None:
    ada, bob = (add(database, acme, name, OWNER) for name in ("ada", "bob"))
    times = []
    for by in (caller_of(acme, user=ada), caller_of(acme, user=bob)):
        with database.transaction(acme.id) as session:
            times.append(users.disable_user(session, bob.id, by=by).disabled_at)
    assert times[0] is not None
    assert times[1] == times[0]


def test_an_address_is_one_user_in_a_tenant_whatever_its_case(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    add(database, acme, "ada", VIEWER)
    with pytest.raises(UserExists), database.transaction(acme.id) as session:
        users.add_user(session, "Ada@Example.COM", OWNER, by=caller_of(acme))
    assert add(database, bolt, "ada", OWNER).email == "ada@example.com"


@pytest.mark.parametrize(
    "email",
    ["", "ada", "@example.com", "ada@", "ada@example", "a b@example.com", "a@b@example.com",
     "ädä@example.com", "ada@.example.com", f"{'a' * 250}@example.com", "ada\n@example.com"],
)  # fmt: skip
def test_refuses_what_is_no_address(database: Database, acme: Tenant, email: str) -> None:
    with pytest.raises(InvalidValue), database.transaction(acme.id) as session:
        users.add_user(session, email, VIEWER, by=caller_of(acme))


def test_an_address_has_at_most_254_characters(database: Database, acme: Tenant) -> None:
    longest = "a" * 242
    assert len(add(database, acme, longest, VIEWER).email) == 254
    with pytest.raises(InvalidValue):
        add(database, acme, longest + "a", VIEWER)


@pytest.mark.parametrize(("own", "wanted"), list(product(TenantRole, TenantRole)))
def test_nobody_gives_a_role_that_is_more_than_they_may_do(
    database: Database, acme: Tenant, own: TenantRole, wanted: TenantRole
) -> None:
    by = caller_of(acme, own.scopes | {Scope.USERS_MANAGE})
    is_covered = own is OWNER or wanted is VIEWER or own is wanted
    user = add(database, acme, "ada", DEVELOPER if wanted is VIEWER else VIEWER)
    may_touch = own is not VIEWER or wanted is not VIEWER
    acts: list[tuple[bool, Act]] = [
        (is_covered, lambda s: users.add_user(s, "bob@example.com", wanted, by=by)),
        (is_covered and may_touch, lambda s: users.change_role(s, user.id, wanted, by=by)),
    ]
    for is_allowed, act in acts:
        with database.transaction(acme.id) as session:
            if is_allowed:
                assert act(session).role is wanted
            else:
                with pytest.raises(GrantTooWide):
                    act(session)


def test_nobody_touches_a_user_who_may_do_more(database: Database, acme: Tenant) -> None:
    owner = add(database, acme, "ada", OWNER)
    disabled = add(database, acme, "bob", OWNER)
    add(database, acme, "eve", OWNER)
    with database.transaction(acme.id) as session:
        users.disable_user(session, disabled.id, by=caller_of(acme))
    by = caller_of(acme, DEVELOPER.scopes | {Scope.USERS_MANAGE})
    acts: list[Act] = [
        lambda session: users.change_role(session, owner.id, VIEWER, by=by),
        lambda session: users.disable_user(session, owner.id, by=by),
        lambda session: users.enable_user(session, disabled.id, by=by),
        lambda session: users.get_user_to_invite(session, owner.id, by=by),
    ]
    for act in acts:
        with pytest.raises(GrantTooWide), database.transaction(acme.id) as session:
            act(session)


def test_nobody_changes_their_own_role_or_disables_themselves(
    database: Database, acme: Tenant
) -> None:
    ada = add(database, acme, "ada", OWNER)
    add(database, acme, "bob", OWNER)
    by = caller_of(acme, user=ada)
    acts: list[Act] = [
        lambda session: users.change_role(session, ada.id, VIEWER, by=by),
        lambda session: users.disable_user(session, ada.id, by=by),
    ]
    for act in acts:
        with pytest.raises(OwnAccount), database.transaction(acme.id) as session:
            act(session)
    with database.transaction(acme.id) as session:  # the role that it has is no change
        assert users.change_role(session, ada.id, OWNER, by=by).role is OWNER


def test_the_last_active_owner_stays(database: Database, acme: Tenant, bolt: Tenant) -> None:
    ada, bob = (add(database, acme, name, OWNER) for name in ("ada", "bob"))
    add(database, bolt, "eve", OWNER)  # another tenant's owner does not count
    by = caller_of(acme)
    with database.transaction(acme.id) as session:
        users.disable_user(session, bob.id, by=by)
        with pytest.raises(LastAdministrator):
            users.change_role(session, ada.id, VIEWER, by=by)
        with pytest.raises(LastAdministrator):
            users.disable_user(session, ada.id, by=by)
        users.enable_user(session, bob.id, by=by)
        assert users.change_role(session, ada.id, VIEWER, by=by).role is VIEWER


def test_of_two_owners_who_disable_each_other_one_stays(database: Database, acme: Tenant) -> None:
    owners = [add(database, acme, name, OWNER) for name in ("ada", "bob")]
    barrier = Barrier(2)

    def disable(actor: User, other: User) -> bool:
        barrier.wait()
        try:
            with database.transaction(acme.id) as session:
                users.disable_user(session, other.id, by=caller_of(acme, user=actor))
        except LastAdministrator:
            return False
        return True

    with ThreadPoolExecutor(2) as threads:
        done = list(threads.map(disable, owners, reversed(owners)))
    assert sorted(done) == [False, True]


@pytest.mark.parametrize(
    "act",
    [
        lambda session, user_id, by: users.get_user(session, user_id),
        lambda session, user_id, by: users.change_role(session, user_id, VIEWER, by=by),
        lambda session, user_id, by: users.disable_user(session, user_id, by=by),
        lambda session, user_id, by: users.enable_user(session, user_id, by=by),
    ],
)
def test_another_tenants_user_is_not_there(
    database: Database,
    acme: Tenant,
    bolt: Tenant,
    act: Callable[[TenantSession, str, Principal], User],
) -> None:
    foreign = add(database, bolt, "eve", DEVELOPER)
    messages = set()
    for user_id in (foreign.id, "0" * 36):
        with pytest.raises(UserNotFound) as caught, database.transaction(acme.id) as session:
            act(session, user_id, caller_of(acme))
        messages.add(str(caught.value).replace(user_id, ""))
    assert len(messages) == 1


def test_a_key_that_is_restricted_to_networks_invites_nobody(
    database: Database, acme: Tenant
) -> None:
    """Whoever sets the password signs in from anywhere, and makes keys that are good anywhere."""
    user = add(database, acme, "ada", OWNER)
    restricted = caller_of(acme, networks=["10.0.0.0/8"])
    with database.transaction(acme.id) as session:
        with pytest.raises(GrantTooWide) as caught:
            users.get_user_to_invite(session, user.id, by=restricted)
        assert caught.value.param == "networks"
        assert users.get_user_to_invite(session, user.id, by=caller_of(acme)).id == user.id
