"""Replacing the server's secret: what was signed before still verifies."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from sqlalchemy import select

from loraplex.platform.audit.event import BY_SYSTEM, Event
from loraplex.platform.audit.models import AuditEntry
from loraplex.platform.audit.service import AuditLog
from loraplex.platform.database import Database
from loraplex.platform.errors import InvalidApiKey
from loraplex.platform.keyring import Keyring, secret_id
from loraplex.platform.keys import repository
from loraplex.platform.keys.models import ApiKey
from loraplex.platform.keys.principal import Scope
from loraplex.platform.keys.service import ApiKeyService
from loraplex.platform.secrets import AUDIT_CHAIN_KEY, derive_key
from loraplex.platform.tenants.models import Tenant
from support.identity import peppers

OLD, NEW = b"old-" * 8, b"new-" * 8


def test_signs_under_the_present_secret_and_verifies_under_every_one() -> None:
    before, after = Keyring([OLD], "purpose"), Keyring([NEW, OLD], "purpose")
    signed = before.sign(b"text")
    assert signed == hmac.digest(derive_key(OLD, "purpose"), b"text", hashlib.sha256)
    assert after.is_signed(b"text", signed, before.current_id)
    assert not after.is_signed(b"other", signed, before.current_id)
    assert not after.is_signed(b"text", signed, after.current_id)
    assert after.sign(b"text") != signed
    assert not before.is_signed(b"text", after.sign(b"text"), after.current_id)


def test_a_secrets_id_is_its_own_whatever_the_purpose_and_tells_nothing_of_it() -> None:
    assert Keyring([OLD], "one").current_id == Keyring([OLD], "two").current_id == secret_id(OLD)
    assert secret_id(OLD) != secret_id(NEW)
    assert secret_id(OLD) not in OLD.hex()


def test_a_key_moves_to_the_present_pepper_when_it_is_used(
    database: Database, acme: Tenant
) -> None:
    old, both, new = (
        ApiKeyService(ring) for ring in (peppers("old-"), peppers("new-", "old-"), peppers("new-"))
    )
    with database.transaction(acme.id) as session:
        used, unused = (old.issue(session, name="ci", scopes=[Scope.INFER]).text for _ in range(2))
        old.revoke(session, old.issue(session, name="ci", scopes=[]).key.id)
    with database.platform_transaction(read_only=True) as session:
        with pytest.raises(InvalidApiKey):
            new.authenticate(session, used)
        assert both.authenticate(session, used).is_use_to_be_noted
    with database.platform_transaction() as session:
        both.note_use(session, used)
    with database.platform_transaction(read_only=True) as session:
        assert repository.count_by_secret(session) == {secret_id(OLD): 1, secret_id(NEW): 1}
        assert not both.authenticate(session, used).is_use_to_be_noted
        assert new.authenticate(session, used)
        with pytest.raises(InvalidApiKey):  # who throws the old secret away loses what it signed
            new.authenticate(session, unused)


def test_no_use_is_noted_of_a_key_whose_secret_is_wrong(database: Database, acme: Tenant) -> None:
    old, both = ApiKeyService(peppers("old-")), ApiKeyService(peppers("new-", "old-"))
    with database.transaction(acme.id) as session:
        issued = old.issue(session, name="ci", scopes=[])
        other = old.issue(session, name="ci", scopes=[]).text
    with database.transaction(acme.id) as session:
        row = session.scalars(select(ApiKey).where(ApiKey.id == issued.key.id)).one()
        row.mac = b"x" * 32
    with database.platform_transaction() as session:
        both.note_use(session, issued.text)
    with database.transaction(acme.id, read_only=True) as session:
        row = session.scalars(select(ApiKey).where(ApiKey.id == issued.key.id)).one()
        assert (row.mac, row.last_used_at) == (b"x" * 32, None)
    assert other


def test_the_audit_chain_verifies_across_secrets(database: Database, acme: Tenant) -> None:
    before = AuditLog(Keyring([OLD], AUDIT_CHAIN_KEY))
    after = AuditLog(Keyring([NEW, OLD], AUDIT_CHAIN_KEY))
    for log in (before, before, after):
        with database.transaction(acme.id) as session:
            log.record(session, BY_SYSTEM, Event("key.create", "x"))
    with database.platform_transaction(read_only=True) as session:
        ids = session.scalars(select(AuditEntry.secret_id).order_by(AuditEntry.number)).all()
        assert ids == [secret_id(OLD), secret_id(OLD), secret_id(NEW)]
        assert after.verify(session, acme.id).breach is None
        lost = before.verify(session, acme.id).breach
    assert lost is not None
    assert lost.number == 3
