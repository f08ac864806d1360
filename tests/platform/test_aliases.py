"""Aliases: set, canary, rollback and removal, and their history."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from loraplex.platform.adapters import repository
from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters.canary import Canary, request_place
from loraplex.platform.adapters.history import AliasChange
from loraplex.platform.adapters.models import AdapterAlias
from loraplex.platform.adapters.registry import AdapterRef, parse_model_name, resolve
from loraplex.platform.adapters.states import AliasAction, VersionState
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    AdapterNotFound,
    AdapterNotReady,
    AliasNotFound,
    BaseMismatch,
    InvalidValue,
    NothingToRollBack,
    VersionAliased,
    VersionNotFound,
)
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from support.catalog import BASE_ID, make_tenant, make_version
from support.scale import part_of

NAME = "support-bot"
REQUEST_IDS = [f"request-{number}" for number in range(200)]


class Target(NamedTuple):
    """What an alias points at, in numbers."""

    version: int
    canary: int | None = None
    percent: float | None = None


def make_versions(session: TenantSession, num_versions: int, *, name: str = NAME) -> None:
    for number in range(1, num_versions + 1):
        make_version(session, name, f"content {number}")


def target_of(alias: AdapterAlias) -> Target:
    canary = None if alias.canary_version is None else alias.canary_version.number
    return Target(alias.version.number, canary, alias.canary_percent)


def list_targets(session: TenantSession) -> dict[str, Target]:
    aliases = catalog.get_adapter(session, NAME).aliases
    return {alias.name: target_of(alias) for alias in aliases}


def what_happened(change: AliasChange) -> tuple[str, int | None, int | None, float | None]:
    return (change.action, change.version_number, change.canary_number, change.canary_percent)


def resolve_for_acme(session: TenantSession, name: str, request_id: str) -> AdapterRef:
    meaning = resolve(session, parse_model_name(name), tenant_slug="acme")
    return meaning.of(request_id, base_id=BASE_ID)


# --- a split ------------------------------------------------------------------------------------


def test_a_split_alias_means_two_versions(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_versions(session, 2)
        alias = catalog.set_alias(session, NAME, "prod", 1, canary=Canary(2, 30))
        assert target_of(alias) == Target(1, 2, 30.0)
    with database.transaction(acme.id, read_only=True) as session:
        assert list_targets(session) == {"prod": Target(1, 2, 30.0)}
        for request_id in REQUEST_IDS[:40]:
            reference = resolve_for_acme(session, "support-bot@prod", request_id)
            is_canary = request_place(reference.adapter_id, "prod", request_id) < 30
            assert (reference.version, reference.is_canary) == (
                (2, True) if is_canary else (1, False)
            )
            assert reference.alias == "prod"


def test_the_bare_name_is_split_as_prod_is(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_versions(session, 3)
        catalog.set_alias(session, NAME, "prod", 1, canary=Canary(2, 50))
        answers = [
            [resolve_for_acme(session, name, request_id) for request_id in REQUEST_IDS[:40]]
            for name in ("support-bot", "acme/support-bot@prod")
        ]
        assert answers[0] == answers[1]
        assert {reference.version for reference in answers[0]} == {1, 2}
        latest = resolve_for_acme(session, "support-bot@latest", REQUEST_IDS[0])
        assert (latest.version, latest.alias, latest.is_canary) == (3, None, False)


def test_a_request_id_is_answered_by_the_same_version(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_versions(session, 2)
        catalog.set_alias(session, NAME, "prod", 1, canary=Canary(2, 50))
    answers = []
    for _ in range(2):
        with database.transaction(acme.id, read_only=True) as session:
            answers.append([resolve_for_acme(session, NAME, one) for one in REQUEST_IDS[:30]])
    assert answers[0] == answers[1]


def test_a_growing_canary_takes_requests_and_gives_none_back(
    database: Database, acme: Tenant
) -> None:
    in_canary: set[str] = set()
    with database.transaction(acme.id) as session:
        make_versions(session, 2)
        for percent in (20, 45, 70, 95):
            catalog.set_alias(session, NAME, "prod", 1, canary=Canary(2, percent))
            references = {one: resolve_for_acme(session, NAME, one) for one in REQUEST_IDS[:30]}
            now = {one for one, reference in references.items() if reference.is_canary}
            assert in_canary < now
            in_canary = now


def test_setting_an_alias_ends_its_canary(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_versions(session, 2)
        catalog.set_alias(session, NAME, "prod", 1, canary=Canary(2, 50))
        promoted = catalog.set_alias(session, NAME, "prod", 2)
        assert target_of(promoted) == Target(2)
        references = [resolve_for_acme(session, NAME, one) for one in REQUEST_IDS[:20]]
        assert {(reference.version, reference.is_canary) for reference in references} == {
            (2, False)
        }


@pytest.mark.parametrize(
    "canary", [Canary(2, 0), Canary(2, 100), Canary(2, float("nan")), Canary(1, 50)]
)
def test_refuses_a_split_that_is_none(database: Database, acme: Tenant, canary: Canary) -> None:
    with database.transaction(acme.id) as session:
        make_versions(session, 2)
        with pytest.raises(InvalidValue):
            catalog.set_alias(session, NAME, "prod", 1, canary=canary)
        assert list_targets(session) == {}


@pytest.mark.parametrize("state", [VersionState.ATTESTING, VersionState.REJECTED])
def test_both_versions_of_a_split_are_ready(
    database: Database, acme: Tenant, state: VersionState
) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, content="good")
        make_version(session, content="bad", state=state)
        for number, canary in ((1, Canary(2, 10)), (2, Canary(1, 10))):
            with pytest.raises(AdapterNotReady):
                catalog.set_alias(session, NAME, "prod", number, canary=canary)
        with pytest.raises(VersionNotFound):
            catalog.set_alias(session, NAME, "prod", 1, canary=Canary(3, 10))


def test_both_versions_of_a_split_are_for_the_same_base(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, content="one")
        make_version(session, content="two", base_id="another base")
        with pytest.raises(BaseMismatch):
            catalog.set_alias(session, NAME, "prod", 1, canary=Canary(2, 10))


def test_a_canary_is_not_deleted_under_its_alias(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_versions(session, 2)
        catalog.set_alias(session, NAME, "prod", 1, canary=Canary(2, 10))
        with pytest.raises(VersionAliased) as caught:
            catalog.begin_version_deletion(session, NAME, 2)
        assert caught.value.aliases == ["prod"]
        catalog.set_alias(session, NAME, "prod", 1)
        catalog.begin_version_deletion(session, NAME, 2)


def raw_update(database: Database, assignments: str, **values: object) -> None:
    with database.platform_transaction() as session:
        session.connection().execute(text(f"UPDATE adapter_aliases SET {assignments}"), values)


@pytest.mark.parametrize(
    "assignments",
    [
        "canary_percent = 0",
        "canary_percent = 100",
        "canary_percent = NULL",
        "canary_version_id = NULL",
        "canary_version_id = version_id",
    ],
)
def test_the_database_refuses_half_a_canary(
    database: Database, acme: Tenant, assignments: str
) -> None:
    with database.transaction(acme.id) as session:
        make_versions(session, 2)
        catalog.set_alias(session, NAME, "prod", 1, canary=Canary(2, 10))
    with pytest.raises(IntegrityError):
        raw_update(database, assignments)
    raw_update(database, "canary_percent = 99")


def test_the_database_refuses_the_canary_of_another_adapter_or_tenant(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(bolt.id) as session:
        foreign = make_version(session)
    with database.transaction(acme.id) as session:
        make_versions(session, 2)
        other = make_version(session, "another")
        own = catalog.get_version(session, NAME, 2)
        catalog.set_alias(session, NAME, "prod", 1, canary=Canary(2, 10))
    for version in (foreign, other):
        with pytest.raises(IntegrityError):
            raw_update(database, "canary_version_id = :id", id=version.id)
    raw_update(database, "canary_version_id = :id", id=own.id)


# --- back again ---------------------------------------------------------------------------------


def test_rolls_back_to_the_whole_target(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_versions(session, 3)
        catalog.set_alias(session, NAME, "prod", 1)
        catalog.set_alias(session, NAME, "prod", 1, canary=Canary(2, 10))
        catalog.set_alias(session, NAME, "prod", 3)
        targets = [target_of(catalog.rollback_alias(session, NAME, "prod")) for _ in range(2)]
        assert targets == [Target(1, 2, 10.0), Target(1)]
        with pytest.raises(NothingToRollBack, match="no earlier target"):
            catalog.rollback_alias(session, NAME, "prod")


def test_goes_on_from_where_it_was_rolled_back_to(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_versions(session, 3)
        for number in (1, 2):
            catalog.set_alias(session, NAME, "prod", number)
        catalog.rollback_alias(session, NAME, "prod")
        catalog.set_alias(session, NAME, "prod", 3)
        assert target_of(catalog.rollback_alias(session, NAME, "prod")) == Target(1)
        with pytest.raises(NothingToRollBack):
            catalog.rollback_alias(session, NAME, "prod")


def test_setting_what_is_so_already_is_no_change(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_versions(session, 2)
        catalog.set_alias(session, NAME, "prod", 1)
        for _ in range(3):
            catalog.set_alias(session, NAME, "prod", 2)
        assert len(catalog.list_alias_changes(session, NAME, "prod")) == 2
        assert target_of(catalog.rollback_alias(session, NAME, "prod")) == Target(1)


@pytest.mark.parametrize("canary", [None, Canary(3, 10)])
def test_does_not_roll_back_to_what_is_gone(
    database: Database, acme: Tenant, canary: Canary | None
) -> None:
    with database.transaction(acme.id) as session:
        make_versions(session, 3)
        catalog.set_alias(session, NAME, "prod", 1, canary=canary)
        catalog.set_alias(session, NAME, "prod", 2)
        catalog.begin_version_deletion(session, NAME, 3 if canary else 1)
        with pytest.raises(NothingToRollBack, match="no longer exists"):
            catalog.rollback_alias(session, NAME, "prod")
        assert list_targets(session) == {"prod": Target(2)}


def test_does_not_roll_back_what_is_not_there(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(bolt.id) as session:
        make_versions(session, 2)
        for number in (1, 2):
            catalog.set_alias(session, NAME, "prod", number)
    with database.transaction(acme.id) as session:
        for function in (catalog.rollback_alias, catalog.remove_alias):
            with pytest.raises(AdapterNotFound):
                function(session, NAME, "prod")
        with pytest.raises(AdapterNotFound):
            catalog.list_alias_changes(session, NAME, "prod")
        make_versions(session, 1)
        with pytest.raises(AliasNotFound):
            catalog.rollback_alias(session, NAME, "prod")
        assert catalog.list_alias_changes(session, NAME, "prod") == []


def test_does_not_go_back_to_before_a_removal(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_versions(session, 2)
        catalog.set_alias(session, NAME, "prod", 1)
        catalog.remove_alias(session, NAME, "prod")
        with pytest.raises(AliasNotFound):
            catalog.rollback_alias(session, NAME, "prod")
        catalog.set_alias(session, NAME, "prod", 2)
        with pytest.raises(NothingToRollBack, match="no earlier target"):
            catalog.rollback_alias(session, NAME, "prod")


# --- what is remembered -------------------------------------------------------------------------


def test_remembers_every_change_and_who_made_it(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_versions(session, 2)
        catalog.set_alias(session, NAME, "prod", 1, changed_by="user:ada@example.com")
        catalog.set_alias(session, NAME, "eu", 2)
        catalog.set_alias(
            session, NAME, "prod", 1, canary=Canary(2, 10), changed_by="user:ada@example.com"
        )
        catalog.rollback_alias(session, NAME, "prod", changed_by="user:ada@example.com")
        catalog.remove_alias(session, NAME, "prod", changed_by="user:ada@example.com")
    with database.transaction(acme.id, read_only=True) as session:
        changes = catalog.list_alias_changes(session, NAME, "prod")
        assert [what_happened(change) for change in changes] == [
            (AliasAction.REMOVE, None, None, None),
            (AliasAction.ROLLBACK, 1, None, None),
            (AliasAction.CANARY, 1, 2, 10.0),
            (AliasAction.SET, 1, None, None),
        ]
        assert {(change.alias, change.changed_by) for change in changes} == {
            ("prod", "user:ada@example.com")
        }
        times = [change.changed_at for change in changes]
        assert times == sorted(times, reverse=True)
        newest = catalog.list_alias_changes(session, NAME, "prod", limit=2)
        assert newest == changes[:2]


def test_remembers_aliases_of_a_deleted_adapter(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_versions(session, 1)
        catalog.set_alias(session, NAME, "prod", 1)
        catalog.begin_adapter_deletion(session, NAME, deleted_by="operator:root")
    with database.transaction(acme.id) as session:
        changes = catalog.list_alias_changes(session, NAME, "prod")
        assert [change.action for change in changes] == [AliasAction.REMOVE, AliasAction.SET]
        assert [change.changed_by for change in changes] == ["operator:root", None]
        make_version(session, content="new")
        catalog.set_alias(session, NAME, "prod", 2)
        with pytest.raises(NothingToRollBack):
            catalog.rollback_alias(session, NAME, "prod")


# --- against a model ----------------------------------------------------------------------------

NUM_VERSIONS = 3
ALIASES = st.sampled_from(["prod", "eu"])
NUMBERS = st.integers(1, NUM_VERSIONS)


class AliasMachine(RuleBasedStateMachine):
    """Aliases against stacks of targets: a change pushes, a rollback pops, a removal empties."""

    database: Database
    tenant: Tenant

    def __init__(self) -> None:
        super().__init__()
        self.cleanup = ExitStack()
        self.session = self.cleanup.enter_context(self.database.transaction(self.tenant.id))
        self.stacks: dict[str, list[Target]] = {"prod": [], "eu": []}
        self.changes: dict[str, list[tuple[AliasAction, Target | None]]] = {"prod": [], "eu": []}
        self.deleted: set[int] = set()

    @initialize()
    def make_the_versions(self) -> None:
        make_versions(self.session, NUM_VERSIONS)
        make_version(self.session, content="never aliased nor deleted")

    @rule(alias=ALIASES, numbers=st.lists(NUMBERS, min_size=1, max_size=3))
    def set(self, alias: str, numbers: list[int]) -> None:
        for number in numbers:
            self.change(alias, AliasAction.SET, Target(number))

    @rule(alias=ALIASES, number=NUMBERS, canary=NUMBERS, percent=st.sampled_from([10.0, 50.0]))
    def split(self, alias: str, number: int, canary: int, percent: float) -> None:
        if canary != number:
            self.change(alias, AliasAction.CANARY, Target(number, canary, percent))

    def change(self, alias: str, action: AliasAction, target: Target) -> None:
        def call() -> AdapterAlias:
            canary = None
            if target.canary is not None and target.percent is not None:
                canary = Canary(target.canary, target.percent)
            return catalog.set_alias(self.session, NAME, alias, target.version, canary=canary)

        if {target.version, target.canary} & self.deleted:
            with pytest.raises(VersionNotFound):
                call()
            return
        assert target_of(call()) == target
        if self.stacks[alias][-1:] != [target]:
            self.stacks[alias].append(target)
            self.changes[alias].append((action, target))

    @rule(alias=ALIASES, times=st.integers(1, 3))
    def roll_back(self, alias: str, times: int) -> None:
        for _ in range(times):
            self.roll_back_once(alias)

    def roll_back_once(self, alias: str) -> None:
        stack = self.stacks[alias]
        earlier = stack[-2] if len(stack) >= 2 else None
        if earlier is None or {earlier.version, earlier.canary} & self.deleted:
            error = NothingToRollBack if stack else AliasNotFound
            words = (
                "no longer exists" if earlier else "had no earlier target" if stack else "no alias"
            )
            with pytest.raises(error, match=words):
                catalog.rollback_alias(self.session, NAME, alias)
            return
        assert target_of(catalog.rollback_alias(self.session, NAME, alias)) == earlier
        stack.pop()
        self.changes[alias].append((AliasAction.ROLLBACK, earlier))

    @rule(alias=ALIASES)
    def remove(self, alias: str) -> None:
        if not self.stacks[alias]:
            with pytest.raises(AliasNotFound):
                catalog.remove_alias(self.session, NAME, alias)
            return
        catalog.remove_alias(self.session, NAME, alias)
        self.stacks[alias].clear()
        self.changes[alias].append((AliasAction.REMOVE, None))

    @rule(number=NUMBERS)
    def delete_version(self, number: int) -> None:
        if number in self.deleted:
            return
        tops = {alias: stack[-1] for alias, stack in self.stacks.items() if stack}
        aliased = sorted(
            alias for alias, top in tops.items() if number in (top.version, top.canary)
        )
        if aliased:
            with pytest.raises(VersionAliased) as caught:
                catalog.begin_version_deletion(self.session, NAME, number)
            assert caught.value.aliases == aliased
        else:
            catalog.begin_version_deletion(self.session, NAME, number)
            self.deleted.add(number)

    @invariant()
    def points_at_the_top(self) -> None:
        if repository.find_adapter(self.session, NAME) is None:
            return
        tops = {alias: stack[-1] for alias, stack in self.stacks.items() if stack}
        assert list_targets(self.session) == tops

    @invariant()
    def remembers_all_changes(self) -> None:
        if repository.find_adapter(self.session, NAME) is None:
            return
        for alias, expected in self.changes.items():
            listed = catalog.list_alias_changes(self.session, NAME, alias, limit=1000)
            assert [what_happened(change) for change in reversed(listed)] == [
                (action, *(target or (None, None, None))) for action, target in expected
            ]

    def teardown(self) -> None:
        self.session.rollback()
        self.cleanup.close()


@pytest.mark.slow
def test_aliases_are_stacks_of_targets(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    machine = type(
        "Machine", (AliasMachine,), {"database": database, "tenant": make_tenant(database, "acme")}
    )
    # Not shrunk: with a database in each step that takes minutes, and fifteen steps can be read.
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=part_of(12, 200),
            stateful_step_count=15,
            deadline=None,
            phases=set(Phase) - {Phase.shrink, Phase.explain},
        ),
    )
    database.close()
