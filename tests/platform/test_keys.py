"""Issuing, checking and revoking keys."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import String, cast, select
from sqlalchemy.orm.attributes import set_committed_value

from loraplex.platform.audit.event import Party
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    ApiKeyExpired,
    ApiKeyRevoked,
    InvalidApiKey,
    InvalidTransition,
    InvalidValue,
    KeyNotFound,
    QuotaExceeded,
    TenantSuspended,
)
from loraplex.platform.keyring import Keyring
from loraplex.platform.keys.models import ApiKey
from loraplex.platform.keys.principal import (
    SYSTEM,
    Actor,
    ActorKind,
    Principal,
    Scope,
    TenantRole,
)
from loraplex.platform.keys.service import LAST_USED_GRANULARITY, ApiKeyService, IssuedKey
from loraplex.platform.keys.stored_key import is_text_of
from loraplex.platform.keys.token import make_token, parse_token
from loraplex.platform.networks import parse_networks
from loraplex.platform.tenants import service as tenants
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.users import service as users
from support.identity import SettableClock, caller_of, peppers
from support.limits import limit

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock(NOON)


@pytest.fixture
def keys(clock: SettableClock) -> ApiKeyService:
    return ApiKeyService(peppers("secret"), clock=clock)


def issue(
    database: Database, keys: ApiKeyService, tenant: Tenant, *, expires_at: datetime | None = None
) -> IssuedKey:
    with database.transaction(tenant.id) as session:
        return keys.issue(session, name="ci", scopes=[Scope.INFER], expires_at=expires_at)


def authenticate(database: Database, keys: ApiKeyService, text: str) -> Principal:
    with database.platform_transaction(read_only=True) as session:
        return keys.authenticate(session, text).principal


def read_last_use(database: Database, tenant: Tenant) -> datetime | None:
    with database.transaction(tenant.id, read_only=True) as session:
        return session.scalars(select(ApiKey.last_used_at)).one()


def test_tells_who_calls(database: Database, keys: ApiKeyService, acme: Tenant) -> None:
    issued = issue(database, keys, acme)
    principal = authenticate(database, keys, issued.text)
    assert principal.key_id == issued.key.id
    assert principal.can(Scope.INFER)
    assert not principal.can(Scope.ADAPTERS_WRITE)


def test_tells_what_the_key_is_restricted_to_and_the_tenants_weight(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    end = NOON + timedelta(days=1)
    with database.platform_transaction() as session:
        tenants.get_tenant(session, "acme").weight = 2.5
    with database.transaction(acme.id) as session:
        text = keys.issue(
            session,
            name="ci",
            scopes=[Scope.INFER],
            adapters=["support"],
            networks=["10.0.0.0/8"],
            expires_at=end,
        ).text
    caller = authenticate(database, keys, text)
    assert caller.adapters == frozenset({"support"})
    assert caller.may_use("support")
    assert not caller.may_use("other")
    assert not caller.may_use(None)
    assert caller.networks == parse_networks(["10.0.0.0/8"])
    assert (caller.expires_at, caller.tenant_weight) == (end, 2.5)


def test_tells_tenants_apart(
    database: Database, keys: ApiKeyService, acme: Tenant, bolt: Tenant
) -> None:
    issued = {tenant.id: issue(database, keys, tenant).text for tenant in (acme, bolt)}
    assert {authenticate(database, keys, text).tenant_id for text in issued.values()} == set(issued)


def test_stores_no_part_of_the_secret(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    issued = issue(database, keys, acme)
    secret = issued.text.rpartition("_")[2]
    columns = [cast(column, String) for column in ApiKey.__table__.columns if column.name != "mac"]
    with database.platform_transaction(read_only=True) as session:
        row = session.execute(select(*columns)).one()
        mac = session.scalars(select(ApiKey.mac)).one()
    assert all(secret not in (value or "") for value in row)
    assert secret.encode() not in mac
    assert issued.text not in repr(issued)


def test_refuses_an_unknown_key_and_a_wrong_secret_alike(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    known, other = issue(database, keys, acme), make_token()
    forged = ApiKeyService(peppers("secret"))
    with database.transaction(acme.id) as session:
        session.add(
            ApiKey(
                id=other.key_id,
                name="ci",
                mac=known.key.mac,
                secret_id=known.key.secret_id,
                scopes=[],
                created_at=NOON,
                created_by="system:system",
            )
        )
    errors = []
    for text in (make_token().text, other.text):
        with pytest.raises(InvalidApiKey) as caught:
            authenticate(database, forged, text)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def test_an_unknown_key_takes_the_work_of_a_known_one(
    database: Database, keys: ApiKeyService, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, known = peppers("secret"), issue(database, keys, acme)
    compared = []
    is_signed = Keyring.is_signed

    def compare(ring: Keyring, message: bytes, mac: bytes, under: str) -> bool:
        compared.append((len(message), len(mac), under))
        return is_signed(ring, message, mac, under)

    monkeypatch.setattr(Keyring, "is_signed", compare)
    assert is_text_of(known.key, parse_token(known.text), ring)
    assert not is_text_of(None, make_token(), ring)
    assert compared == [(60, 32, ring.current_id)] * 2


def test_refuses_a_key_made_under_another_pepper(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    issued = issue(database, keys, acme)
    with pytest.raises(InvalidApiKey):
        authenticate(database, ApiKeyService(peppers("other")), issued.text)


def test_refuses_a_malformed_key_without_asking_the_database(keys: ApiKeyService) -> None:
    with pytest.raises(InvalidApiKey):
        keys.authenticate(None, "lpx_live_' OR 1=1 --")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "is_refused"), [(-300, False), (-1, False), (0, True), (1, True), (300, True)]
)
def test_refuses_an_expired_key_from_the_moment_on(
    database: Database,
    keys: ApiKeyService,
    clock: SettableClock,
    acme: Tenant,
    seconds: int,
    is_refused: bool,
) -> None:
    expires_at = NOON + timedelta(days=1)
    text = issue(database, keys, acme, expires_at=expires_at).text
    clock.now = expires_at + timedelta(seconds=seconds)
    if is_refused:
        with pytest.raises(ApiKeyExpired):
            authenticate(database, keys, text)
    else:
        assert authenticate(database, keys, text)


def test_refuses_a_revoked_key(
    database: Database, keys: ApiKeyService, clock: SettableClock, acme: Tenant
) -> None:
    issued, other = issue(database, keys, acme), issue(database, keys, acme)
    with database.transaction(acme.id) as session:
        first = keys.revoke(session, issued.key.id).revoked_at
        clock.now += timedelta(hours=1)
        assert keys.revoke(session, issued.key.id).revoked_at == first
    with pytest.raises(ApiKeyRevoked):
        authenticate(database, keys, issued.text)
    assert authenticate(database, keys, other.text)


def test_refuses_the_keys_of_a_suspended_tenant_until_it_is_resumed(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    text = issue(database, keys, acme).text
    with database.platform_transaction() as session:
        tenants.set_suspended(tenants.get_tenant(session, "acme"), True)
    with pytest.raises(TenantSuspended) as caught:
        authenticate(database, keys, text)
    key = Actor(ActorKind.KEY, parse_token(text).key_id, "ci")
    assert caught.value.refused == Party(acme.id, key)
    with database.platform_transaction() as session:
        tenants.set_suspended(tenants.get_tenant(session, "acme"), False)
    assert authenticate(database, keys, text)


def test_does_not_revoke_another_tenants_key(
    database: Database, keys: ApiKeyService, acme: Tenant, bolt: Tenant
) -> None:
    issued = issue(database, keys, acme)
    with pytest.raises(KeyNotFound) as foreign, database.transaction(bolt.id) as session:
        keys.revoke(session, issued.key.id)
    with pytest.raises(KeyNotFound) as unknown, database.transaction(bolt.id) as session:
        keys.revoke(session, "0" * 12)
    assert str(foreign.value) == str(unknown.value).replace("0" * 12, issued.key.id)
    assert authenticate(database, keys, issued.text)


def test_lists_own_keys_the_oldest_first(
    database: Database, keys: ApiKeyService, clock: SettableClock, acme: Tenant, bolt: Tenant
) -> None:
    issued = []
    for minute in range(3):
        clock.now = NOON + timedelta(minutes=minute)
        issued.append(issue(database, keys, acme).key.id)
    issue(database, keys, bolt)
    with database.transaction(acme.id, read_only=True) as session:
        assert [key.id for key in keys.list_keys(session)] == issued
        assert [key.id for key in keys.list_keys(session, limit=2)] == issued[:2]
        rest = keys.list_keys(session, after=issued[0], limit=1)
        assert [(key.id, key.created_at) for key in rest] == [
            (issued[1], NOON + timedelta(minutes=1))
        ]


def test_a_key_is_found_as_the_database_has_it_now(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    issued = issue(database, keys, acme)
    with database.transaction(acme.id) as session:
        key = keys.get(session, issued.key.id)
        set_committed_value(key, "name", "read long ago")
        assert keys.get(session, key.id).name == "ci"


def test_lists_the_keys_that_are_active_and_those_of_a_user(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    revoked, active = (issue(database, keys, acme).key.id for _ in range(2))
    issue(database, keys, acme, expires_at=NOON)
    ending = issue(database, keys, acme, expires_at=NOON + timedelta(seconds=1)).key.id
    with database.transaction(acme.id) as session:
        keys.revoke(session, revoked)
        user = users.add_user(session, "ada@acme.example", TenantRole.VIEWER, by=caller_of(acme))
        own = keys.issue(session, name="ada's", scopes=[], user_id=user.id).key.id
        assert {key.id for key in keys.list_keys(session, is_active=True)} == {active, ending, own}
        assert len(keys.list_keys(session)) == 5
        assert [key.id for key in keys.list_keys(session, user_id=user.id)] == [own]


def test_revokes_the_keys_of_a_user_that_are_not_yet_and_no_others(
    database: Database, keys: ApiKeyService, clock: SettableClock, acme: Tenant
) -> None:
    other = issue(database, keys, acme)
    with database.transaction(acme.id) as session:
        user = users.add_user(session, "ada@acme.example", TenantRole.VIEWER, by=caller_of(acme))
        before, now = (
            keys.issue(session, name="ada's", scopes=[], user_id=user.id).key.id for _ in range(2)
        )
        keys.revoke(session, before)
        clock.now += timedelta(hours=1)
        assert keys.revoke_keys_of_user(session, user.id) == 1
    with database.transaction(acme.id, read_only=True) as session:
        assert {key.id: key.revoked_at for key in keys.list_keys(session)} == {
            other.key.id: None,
            before: NOON,
            now: NOON + timedelta(hours=1),
        }


def test_a_tenant_has_no_more_keys_than_are_allowed(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    limit(database, acme.id, keys=1)
    issue(database, keys, acme)
    with pytest.raises(QuotaExceeded):
        issue(database, keys, acme)


def test_an_expired_key_is_not_rotated(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    expired = issue(database, keys, acme, expires_at=NOON).key.id
    with pytest.raises(InvalidTransition), database.transaction(acme.id) as session:
        keys.rotate(session, expired, overlap=timedelta(hours=1), issuer=caller_of(acme))


@pytest.mark.parametrize(
    ("actor", "author"),
    [
        (SYSTEM, "system"),
        (Actor(ActorKind.KEY, "AbCdEf012345", "ci"), "key:AbCdEf012345"),
        (Actor(ActorKind.USER, "id", "ada@acme.example"), "user:ada@acme.example"),
    ],
)
def test_an_author_is_a_keys_id_or_a_persons_name(actor: Actor, author: str) -> None:
    assert actor.author == author


def test_notes_the_last_use_to_the_hour(
    database: Database, keys: ApiKeyService, clock: SettableClock, acme: Tenant
) -> None:
    text = issue(database, keys, acme).text

    def use() -> bool:
        with database.platform_transaction(read_only=True) as session:
            is_due = keys.authenticate(session, text).is_use_to_be_noted
        with database.platform_transaction() as session:
            keys.note_use(session, text)
        return is_due

    assert use()
    clock.now = NOON + LAST_USED_GRANULARITY - timedelta(seconds=1)
    assert not use()
    assert read_last_use(database, acme) == NOON
    clock.now = NOON + LAST_USED_GRANULARITY
    assert use()
    assert read_last_use(database, acme) == clock.now


def test_a_name_has_at_most_200_characters(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        assert keys.issue(session, name="x" * 200, scopes=[]).key.name == "x" * 200


@pytest.mark.parametrize("name", ["", "x" * 201])
def test_refuses_a_bad_name(
    database: Database, keys: ApiKeyService, acme: Tenant, name: str
) -> None:
    with pytest.raises(InvalidValue), database.transaction(acme.id) as session:
        keys.issue(session, name=name, scopes=[])


def test_refuses_an_expiry_without_a_time_zone(
    database: Database, keys: ApiKeyService, acme: Tenant
) -> None:
    with pytest.raises(Exception, match="time zone"):
        issue(database, keys, acme, expires_at=datetime(2026, 5, 5))
