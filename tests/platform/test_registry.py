"""Resolving a model's name to one immutable version, or to one uniform error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.identity import AdapterKey
from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters.registry import AdapterRef, ModelName, parse_model_name, resolve
from loraplex.platform.adapters.states import VersionState
from loraplex.platform.database import Database
from loraplex.platform.errors import AdapterNotReady, BaseMismatch, ModelNotFound
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from support.catalog import BASE_ID, make_digest, make_version

DIGEST = make_digest("weights")
PREFIX = DIGEST[: len("sha256:") + 12]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sql", ModelName("sql", "sql")),
        ("acme/sql", ModelName("acme/sql", "sql", "acme")),
        ("sql@3", ModelName("sql@3", "sql", version=3)),
        ("sql@999999999", ModelName("sql@999999999", "sql", version=999_999_999)),
        ("acme/sql@prod", ModelName("acme/sql@prod", "sql", "acme", alias="prod")),
        ("sql@latest", ModelName("sql@latest", "sql", alias="latest")),
        ("sql@v3", ModelName("sql@v3", "sql", alias="v3")),
        (f"sql@{PREFIX}", ModelName(f"sql@{PREFIX}", "sql", digest_prefix=PREFIX)),
        (f"a/b@{DIGEST}", ModelName(f"a/b@{DIGEST}", "b", "a", digest_prefix=DIGEST)),
    ],
)
def test_takes_names_apart(text: str, expected: ModelName) -> None:
    assert parse_model_name(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@",
        "/",
        "/sql",
        "acme/",
        "sql@",
        "a/b/c",
        "..",
        "acme/..",
        "SQL",
        " sql",
        "sql\n",
        "sql@0",
        "sql@03",
        "sql@-1",
        "sql@.1",
        "sql@٣",
        "sql@1000000000",
        "sql@prod@3",
        "sql@3@prod",
        "sql@sha256:",
        "sql@sha256:" + "a" * 11,
        "sql@sha256:" + "a" * 65,
        "sql@sha256:" + "A" * 64,
        "sql@sha256:" + "%" * 12,
        "sql@sha256",
        "acme@3/sql",
        "ac.me/sql",
        "sql@" + "a" * 65,
        "a" * 65,
        "sql'; DROP TABLE adapters; --",
    ],
)
def test_nothing_can_have_other_names(text: str) -> None:
    with pytest.raises(ModelNotFound):
        parse_model_name(text)


@given(st.text(alphabet="ab1@/:._-sh256%é", max_size=30))
def test_what_is_read_is_written_back(text: str) -> None:
    try:
        name = parse_model_name(text)
    except ModelNotFound:
        return
    tenant = "" if name.tenant is None else f"{name.tenant}/"
    suffixes = [str(part) for part in (name.version, name.alias, name.digest_prefix) if part]
    assert len(suffixes) <= 1
    assert text == tenant + "@".join([name.adapter, *suffixes])


@pytest.fixture
def session(database: Database, acme: Tenant, bolt: Tenant) -> Iterator[TenantSession]:
    """Acme's session. Bolt has a ready `theirs`, and a `sql` with an alias `prod`."""
    with database.transaction(bolt.id) as foreign:
        make_version(foreign, "theirs")
        make_version(foreign, "sql")
        catalog.set_alias(foreign, "sql", "prod", 1)
    with database.transaction(acme.id) as session:
        yield session


def resolve_for_acme(session: TenantSession, text: str, *, base_id: str = BASE_ID) -> AdapterRef:
    return resolve(session, parse_model_name(text), tenant_slug="acme").of("r", base_id=base_id)


def test_tells_everything_about_the_version(session: TenantSession, acme: Tenant) -> None:
    version = make_version(session, "sql")
    reference = resolve_for_acme(session, "sql")
    assert reference == AdapterRef(
        key=AdapterKey(acme.id, DIGEST),
        adapter_id=version.adapter_id,
        version_id=version.id,
        tenant_slug="acme",
        name="sql",
        version=1,
        state=VersionState.READY,
        base_id=BASE_ID,
        object_sha256=version.object_sha256,
        size_bytes=7,
        alias=None,
        is_canary=False,
    )
    assert reference.pinned == "acme/sql@1"


def test_the_pinned_name_means_the_same_for_ever(session: TenantSession) -> None:
    make_version(session, "sql", "a")
    first = resolve_for_acme(session, "sql")
    make_version(session, "sql", "b")
    catalog.set_alias(session, "sql", "prod", 2)
    assert resolve_for_acme(session, first.pinned) == first


def test_resolves(session: TenantSession) -> None:
    numbers = {
        "sql": 2,
        "acme/sql": 2,
        "sql@1": 1,
        "sql@latest": 3,
        "sql@prod": 2,
        "acme/sql@old": 1,
        f"sql@{make_digest('content 1')}": 1,
        f"sql@{make_digest('content 3')[:19]}": 3,
    }
    for content in (1, 2, 3):
        make_version(session, "sql", f"content {content}")
    make_version(session, "sql", "not yet", state=VersionState.ATTESTING)
    catalog.set_alias(session, "sql", "prod", 2)
    catalog.set_alias(session, "sql", "old", 1)
    assert {text: resolve_for_acme(session, text).version for text in numbers} == numbers


def test_without_prod_the_newest_ready_version_is_meant(session: TenantSession) -> None:
    for content in "ab":
        make_version(session, "sql", content)
    make_version(session, "sql", "c", state=VersionState.REJECTED)
    assert resolve_for_acme(session, "sql").version == 2


FOREIGN_UNKNOWN_AND_DELETED = (
    "never-was",
    "acme/never-was",
    "theirs",
    "bolt/theirs",
    "bolt/theirs@1",
    "bolt/sql",
    "nobody/sql",
    f"theirs@{DIGEST}",
    "sql@2",
    "sql@prod",
    f"sql@{DIGEST}",
    f"sql@{PREFIX}",
    "deleting",
    "deleting@1",
    "deleted",
    "deleted@1",
    "deleted@latest",
    f"deleted@{make_digest('deleted')}",
)


def test_foreign_unknown_and_deleted_are_the_same_error(session: TenantSession) -> None:
    make_version(session, "sql", "own")
    for state in (VersionState.DELETING, VersionState.DELETED):
        make_version(session, state, state, state=state)
    with pytest.raises(ModelNotFound) as unknown:
        resolve_for_acme(session, "unknown")
    for text in FOREIGN_UNKNOWN_AND_DELETED:
        with pytest.raises(ModelNotFound) as caught:
            resolve_for_acme(session, text)
        assert str(caught.value) == str(unknown.value).replace("unknown", text)
        assert caught.value.code == unknown.value.code == "model_not_found"


@pytest.mark.parametrize(
    "state", [VersionState.VALIDATED, VersionState.ATTESTING, VersionState.REJECTED]
)
def test_says_that_a_version_is_not_ready(session: TenantSession, state: VersionState) -> None:
    make_version(session, "sql", state=state)
    for suffix in ("", "@1", "@latest", f"@{DIGEST}"):
        with pytest.raises(AdapterNotReady, match=state) as caught:
            resolve_for_acme(session, "sql" + suffix)
        assert caught.value.state == state
        assert caught.value.reason == ("no_effect" if state is VersionState.REJECTED else None)


def test_says_that_a_version_is_for_another_base(session: TenantSession) -> None:
    make_version(session, "sql")
    with pytest.raises(BaseMismatch):
        resolve_for_acme(session, "sql", base_id="another base")


def test_does_not_fall_back_to_an_older_version_for_the_served_base(
    session: TenantSession,
) -> None:
    make_version(session, "sql", "old")
    make_version(session, "sql", "new", base_id="another base")
    with pytest.raises(BaseMismatch):
        resolve_for_acme(session, "sql")


def test_a_digest_finds_the_ready_one_of_its_versions(session: TenantSession) -> None:
    make_version(session, "sql", state=VersionState.REJECTED)
    make_version(session, "sql")
    assert resolve_for_acme(session, f"sql@{DIGEST}").version == 2


def test_an_ambiguous_prefix_finds_nothing(session: TenantSession) -> None:
    for content in "ab":
        version = make_version(session, "sql", content)
        version.digest = PREFIX + version.digest[len(PREFIX) :]
    with pytest.raises(ModelNotFound):
        resolve_for_acme(session, f"sql@{PREFIX}")
    assert resolve_for_acme(session, f"sql@{version.digest}").version == 2
