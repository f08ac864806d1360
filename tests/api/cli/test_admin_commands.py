"""`loraplex tenants`, `keys` and `db`: what they print where, how they exit, what they leave."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from loraplex.api import cli
from loraplex.api.cli.client import DEFAULT_URL
from loraplex.api.cli.serve import next_steps
from loraplex.api.settings import Settings, default_data_dir, load_settings
from loraplex.platform.database import Database
from loraplex.platform.errors import ApiKeyRevoked, InvalidValue, TenantSuspended
from loraplex.platform.keys.principal import Principal, Scope
from loraplex.platform.keys.service import ApiKeyService
from loraplex.platform.keys.token import parse_token
from loraplex.platform.secrets import API_KEY_PEPPER, derive_key
from loraplex.platform.tenants import service as tenants
from support.server import free_port


class Outcome(NamedTuple):
    exit_code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """What was printed as JSON."""
        return json.loads(self.out)


Loraplex = Callable[..., Outcome]


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of an installation that has never run."""
    for name in ("LORAPLEX_DATABASE", "LORAPLEX_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LORAPLEX_DATA_DIR", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def loraplex(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Loraplex:
    """The command, run within this process."""

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["loraplex", *arguments])
        try:
            exit_code = cli.main()
        except SystemExit as exc:
            exit_code = int(exc.code or 0)
        return Outcome(exit_code, *capsys.readouterr())

    return run


@pytest.fixture
def installed(loraplex: Loraplex) -> Loraplex:
    """The command, on a database with the tenant `acme`."""
    assert loraplex("db", "upgrade").exit_code == 0
    assert loraplex("tenants", "create", "acme", "--name", "Acme Ltd").exit_code == 0
    return loraplex


def authenticate(text: str) -> Principal:
    """As the server does."""
    settings = Settings()
    keys = ApiKeyService(derive_key(settings.load_secret(), API_KEY_PEPPER))
    database = Database(settings.database_url)
    try:
        with database.platform_transaction() as session:
            return keys.authenticate(session, text)
    finally:
        database.close()


def test_makes_the_embedded_database_for_its_owner_alone(
    loraplex: Loraplex, data_dir: Path
) -> None:
    assert loraplex("db", "current").out == "none\n"
    upgraded = loraplex("db", "upgrade", "--json")
    assert upgraded.data["revision"] == upgraded.data["head"]
    assert "Upgraded" in upgraded.err
    assert (data_dir / "loraplex.db").exists()
    assert data_dir.stat().st_mode & 0o077 == 0
    assert "was up to date" in loraplex("db", "upgrade").err
    assert loraplex("db", "current", "--json").data == upgraded.data


def test_works_on_the_database_that_is_named(
    loraplex: Loraplex, data_dir: Path, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'other.db'}"
    loraplex("db", "upgrade", "--database", url)
    loraplex("tenants", "create", "acme", "--database", url)
    assert [row["slug"] for row in loraplex("tenants", "ls", "--json", "--database", url).data] == [
        "acme"
    ]
    assert not (data_dir / "loraplex.db").exists()


def test_the_flag_wins_over_the_environment(
    loraplex: Loraplex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_DATABASE", "sqlite:////no/such/folder/x.db")
    assert loraplex("db", "current").exit_code == 7
    url = f"sqlite:///{tmp_path / 'other.db'}"
    assert loraplex("db", "current", "--database", url).out == "none\n"


def test_asks_for_the_schema_before_anything_else(loraplex: Loraplex) -> None:
    outcome = loraplex("tenants", "ls")
    assert (outcome.exit_code, outcome.out) == (7, "")
    assert "loraplex db upgrade" in outcome.err


def test_a_database_without_a_schema_is_named_and_not_made(
    loraplex: Loraplex, tmp_path: Path
) -> None:
    path = tmp_path / "other.db"
    outcome = loraplex("tenants", "ls", "--database", f"sqlite:///{path}")
    assert outcome.exit_code == 7
    assert str(path) in outcome.err
    assert not path.exists()


def test_works_in_the_data_folder_that_is_named(
    loraplex: Loraplex, data_dir: Path, tmp_path: Path
) -> None:
    where = ("--data-dir", str(tmp_path / "elsewhere"))
    assert loraplex("db", "upgrade", *where).exit_code == 0
    assert loraplex("tenants", "create", "acme", *where).exit_code == 0
    assert loraplex("keys", "create", "acme", *where).out.startswith("lpx_live_")
    assert not (data_dir / "loraplex.db").exists()
    assert (tmp_path / "elsewhere" / "secret").exists()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql",
        "postgresql://user:hunter2@host/db",
        "mysql://user:hunter2@host/db",
        "postgresql+psycopg://user:hunter2@host:port/db",
        "sqlite+aiosqlite:///hunter2.db",
    ],
)
@pytest.mark.parametrize("by_flag", [True, False])
def test_a_database_that_is_not_served_is_refused_without_being_repeated(
    loraplex: Loraplex, monkeypatch: pytest.MonkeyPatch, url: str, by_flag: bool
) -> None:
    if not by_flag:
        monkeypatch.setenv("LORAPLEX_DATABASE", url)
    outcome = loraplex("db", "current", *(["--database", url] if by_flag else []))
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert "postgresql+psycopg://USER@HOST/NAME" in outcome.err
    assert "hunter2" not in outcome.err


def test_a_database_that_does_not_answer_is_named_without_its_password(
    loraplex: Loraplex,
) -> None:
    pytest.importorskip("psycopg")
    url = f"postgresql+psycopg://user:hunter2@127.0.0.1:{free_port()}/db?application_name=hunter2"
    outcome = loraplex("tenants", "ls", "--database", url)
    assert outcome.exit_code == 7
    assert "user:***@127.0.0.1" in outcome.err
    assert "refused" in outcome.err
    assert "hunter2" not in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_a_setting_that_cannot_be_read_is_named_and_not_repeated(
    loraplex: Loraplex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_DRAIN_SECONDS", "hunter2")
    outcome = loraplex("tenants", "ls")
    assert outcome.exit_code == 2
    assert "LORAPLEX_DRAIN_SECONDS" in outcome.err
    assert "hunter2" not in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_a_flag_that_cannot_be_taken_is_named() -> None:
    with pytest.raises(InvalidValue, match=r"^--served-model-name: "):
        load_settings(served_model_name="")


def test_the_next_steps_are_for_the_installation_that_serves(tmp_path: Path) -> None:
    plain = next_steps(Settings(data_dir=default_data_dir(), database=None), DEFAULT_URL)
    assert plain == [
        "Make a tenant and a key: loraplex tenants create NAME && loraplex keys create NAME"
    ]
    settings = Settings(
        data_dir=tmp_path / "my data", database="postgresql+psycopg://u:hunter2@h/d"
    )
    make, push = next_steps(settings, "http://127.0.0.1:9000")
    assert make.count(f" --data-dir '{tmp_path / 'my data'}' --database ...") == 2
    assert "hunter2" not in make
    assert "LORAPLEX_URL=http://127.0.0.1:9000 loraplex adapters push" in push


def test_lists_what_it_made(installed: Loraplex) -> None:
    installed("tenants", "create", "bolt")
    rows = installed("tenants", "ls", "--json").data
    assert [(row["slug"], row["name"], row["suspended_at"]) for row in rows] == [
        ("acme", "Acme Ltd", None),
        ("bolt", None, None),
    ]
    header, *lines = installed("tenants", "ls").out.splitlines()
    assert header.split() == ["slug", "name", "id", "created_at", "suspended_at"]
    assert [line.split()[0] for line in lines] == ["acme", "bolt"]


def test_prints_data_on_stdout_and_advice_on_stderr(installed: Loraplex) -> None:
    outcome = installed("tenants", "create", "bolt", "--json")
    assert outcome.data["slug"] == "bolt"
    assert "loraplex keys create bolt" in outcome.err


def test_prints_a_key_alone_so_that_scripts_can_take_it(installed: Loraplex) -> None:
    outcome = installed("keys", "create", "acme")
    principal = authenticate(outcome.out.removesuffix("\n"))
    assert (principal.tenant_slug, principal.scopes) == ("acme", frozenset(Scope))
    assert outcome.out.strip() not in outcome.err


def test_issues_a_key_as_it_is_told(installed: Loraplex) -> None:
    row = installed(
        *("keys", "create", "acme", "--name", "ci", "--scope", "infer"),
        *("--scope", "usage:read", "--expires-in-days", "7", "--json"),
    ).data
    assert (row["name"], row["scopes"]) == ("ci", ["infer", "usage:read"])
    assert row["expires_at"] > row["created_at"]
    assert authenticate(row["key"]).key_id == row["id"]


def test_never_shows_a_key_again(installed: Loraplex) -> None:
    text = installed("keys", "create", "acme").out.strip()
    listed = installed("keys", "ls", "acme", "--json")
    assert [row["id"] for row in listed.data] == [parse_token(text).key_id]
    assert text.rpartition("_")[2] not in listed.out


def test_revokes_a_key(installed: Loraplex) -> None:
    row = installed("keys", "create", "acme", "--json").data
    assert installed("keys", "revoke", "acme", row["id"], "--json").data["revoked_at"]
    with pytest.raises(ApiKeyRevoked):
        authenticate(row["key"])


def test_suspends_and_resumes_a_tenant(installed: Loraplex) -> None:
    text = installed("keys", "create", "acme").out.strip()
    assert installed("tenants", "suspend", "acme", "--json").data["suspended_at"]
    with pytest.raises(TenantSuspended):
        authenticate(text)
    assert installed("tenants", "resume", "acme", "--json").data["suspended_at"] is None
    assert authenticate(text)


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (["no-such-command"], 2),
        (["tenants", "create"], 2),
        (["tenants", "create", "Not A Slug"], 2),
        (["keys", "create", "acme", "--scope", "everything"], 2),
        (["keys", "create", "acme", "--expires-in-days", "0"], 2),
        (["keys", "create", "nobody"], 4),
        (["keys", "ls", "nobody"], 4),
        (["keys", "revoke", "acme", "no-such-key"], 4),
        (["tenants", "suspend", "nobody"], 4),
        (["tenants", "create", "acme"], 5),
        (["tenants", "ls", "--database", "sqlite:////no/such/folder/x.db"], 7),
    ],
)
def test_says_by_its_exit_code_what_went_wrong(
    installed: Loraplex, arguments: list[str], exit_code: int
) -> None:
    outcome = installed(*arguments)
    assert (outcome.exit_code, outcome.out) == (exit_code, "")
    assert outcome.err


def test_a_name_cannot_steer_the_terminal(installed: Loraplex, data_dir: Path) -> None:
    database = Database(f"sqlite:///{data_dir / 'loraplex.db'}")
    with database.platform_transaction() as session:
        tenants.create_tenant(session, "evil", name="\x1b[2Jboo\nfake row")
    database.close()
    printed = installed("tenants", "ls").out
    assert "\x1b" not in printed
    assert len(printed.splitlines()) == 3


def test_refuses_a_secret_that_others_may_read(installed: Loraplex, data_dir: Path) -> None:
    installed("keys", "create", "acme")
    (data_dir / "secret").chmod(0o644)
    outcome = installed("keys", "create", "acme")
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert "chmod 600" in outcome.err


def test_takes_the_secret_from_the_environment(
    installed: Loraplex, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_SECRET", "ab" * 32)
    text = installed("keys", "create", "acme").out.strip()
    assert authenticate(text).tenant_slug == "acme"
    assert not (data_dir / "secret").exists()
    assert "ab" * 32 not in repr(Settings())


@pytest.mark.parametrize(
    ("data_home", "expected"),
    [
        ("/srv/data", Path("/srv/data/loraplex")),
        ("relative", Path.home() / ".local/share/loraplex"),
        ("", Path.home() / ".local/share/loraplex"),
    ],
)
def test_lives_in_the_users_data_folder(
    monkeypatch: pytest.MonkeyPatch, data_home: str, expected: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", data_home)
    assert default_data_dir() == expected


def test_helps_without_loading_the_commands() -> None:
    script = (
        "import sys; from loraplex.api.cli import app; app(['--help'], standalone_mode=False);"
        "heavy = {'sqlalchemy', 'alembic', 'fastapi', 'boto3', 'torch', 'numpy', 'httpx'};"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    root = Path(cli.__file__).parents[3]
    finished = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert all(name in finished.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_help(loraplex: Loraplex, name: str) -> None:
    outcome = loraplex(name, "--help")
    assert outcome.exit_code == 0
    assert f"loraplex {name}" in outcome.out
