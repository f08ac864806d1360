"""`loraplex db` and `operators create`: commands that use the database without a server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import select

from loraplex.api import cli
from loraplex.api.cli.serve import next_steps
from loraplex.api.client.connection import DEFAULT_URL
from loraplex.api.settings import Settings, default_data_dir, load_settings
from loraplex.platform.accounts.service import AccountService
from loraplex.platform.audit.models import PlatformAuditEntry
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import InvalidApiKey, InvalidValue
from loraplex.platform.keyring import Keyring
from loraplex.platform.keys.principal import OperatorPrincipal, OperatorRole
from loraplex.platform.operators.service import OperatorService
from loraplex.platform.secrets import API_KEY_PEPPER
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
    for name in ("LORAPLEX_DATABASE", "LORAPLEX_SECRET", "LORAPLEX_SECRET_PREVIOUS"):
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
    """The command, on a database that is there."""
    assert loraplex("db", "upgrade").exit_code == 0
    return loraplex


def authenticate(text: str) -> OperatorPrincipal:
    """As the server does."""
    settings = Settings()
    operators = OperatorService(Keyring(settings.load_secrets(), API_KEY_PEPPER))
    database = Database(settings.database_url)
    try:
        with database.platform_transaction(read_only=True) as session:
            return operators.authenticate(session, text).principal
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
    loraplex: Loraplex, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'other.db'}"
    loraplex("db", "upgrade", "--database", url)
    text = loraplex("operators", "create", "root", "--database", url).out.strip()
    monkeypatch.setenv("LORAPLEX_DATABASE", url)
    assert authenticate(text).name == "root"
    assert not (data_dir / "loraplex.db").exists()


def test_the_flag_wins_over_the_environment(
    loraplex: Loraplex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_DATABASE", "sqlite:////no/such/folder/x.db")
    assert loraplex("db", "current").exit_code == 7
    url = f"sqlite:///{tmp_path / 'other.db'}"
    assert loraplex("db", "current", "--database", url).out == "none\n"


def test_the_file_of_a_server_names_its_data(
    loraplex: Loraplex, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LORAPLEX_DATA_DIR")
    file = tmp_path / "loraplex.yaml"
    file.write_text(f"model: ./a-base\nmax-num-seqs: 128\ndata-dir: {tmp_path / 'elsewhere'}\n")
    config = ("--config", str(file))
    assert loraplex("db", "upgrade", *config).exit_code == 0
    assert loraplex("operators", "create", "root", *config).out.startswith("lpx_admin_")
    assert loraplex("audit", "verify", *config).exit_code == 0
    assert loraplex("gc", "--dry-run", *config).exit_code == 0
    assert "present" in loraplex("db", "secrets", *config).out
    assert (tmp_path / "elsewhere" / "loraplex.db").exists()
    assert not (data_dir / "loraplex.db").exists()


def test_a_bad_value_in_the_file_of_a_server_is_named_by_its_line(
    loraplex: Loraplex, tmp_path: Path
) -> None:
    file = tmp_path / "loraplex.yaml"
    config = ("--config", str(file))
    file.write_text("max-num-seqs: 128\nmax-num-sequences: 3\n")
    assert f"{file}:2: max-num-sequences" in loraplex("db", "current", *config).err
    file.write_text("data-dir: [one, two]\n")
    assert f"{file}:1: data-dir" in loraplex("db", "current", *config).err


def test_asks_for_the_schema_before_anything_else(loraplex: Loraplex) -> None:
    outcome = loraplex("operators", "create", "root")
    assert (outcome.exit_code, outcome.out) == (7, "")
    assert "loraplex db upgrade" in outcome.err


def test_a_database_without_a_schema_is_named_and_not_made(
    loraplex: Loraplex, tmp_path: Path
) -> None:
    path = tmp_path / "other.db"
    outcome = loraplex("operators", "create", "root", "--database", f"sqlite:///{path}")
    assert outcome.exit_code == 7
    assert str(path) in outcome.err
    assert not path.exists()


def test_works_in_the_data_folder_that_is_named(
    loraplex: Loraplex, data_dir: Path, tmp_path: Path
) -> None:
    where = ("--data-dir", str(tmp_path / "elsewhere"))
    assert loraplex("db", "upgrade", *where).exit_code == 0
    assert loraplex("operators", "create", "root", *where).out.startswith("lpx_admin_")
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
    outcome = loraplex("operators", "create", "root", "--database", url)
    assert outcome.exit_code == 7
    assert "user:***@127.0.0.1" in outcome.err
    assert "refused" in outcome.err
    assert "hunter2" not in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_a_setting_that_cannot_be_read_is_named_and_not_repeated(
    loraplex: Loraplex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_DRAIN_SECONDS", "hunter2")
    outcome = loraplex("operators", "create", "root")
    assert outcome.exit_code == 2
    assert "LORAPLEX_DRAIN_SECONDS" in outcome.err
    assert "hunter2" not in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_a_flag_that_cannot_be_taken_is_named() -> None:
    with pytest.raises(InvalidValue, match=r"^--served-model-name: "):
        load_settings(served_model_name="")


def test_the_next_steps_are_for_the_installation_that_serves(tmp_path: Path) -> None:
    plain = next_steps(Settings(data_dir=default_data_dir(), database=None), DEFAULT_URL)
    assert plain[:2] == [
        "Create the first operator: loraplex operators create NAME",
        "Log in with its key: loraplex login",
    ]
    settings = Settings(
        data_dir=tmp_path / "my data", database="postgresql+psycopg://u:hunter2@h/d"
    )
    create, login, _ = next_steps(settings, "http://127.0.0.1:9000")
    assert create.endswith(f" --data-dir '{tmp_path / 'my data'}' --database ...")
    assert "LORAPLEX_URL=http://127.0.0.1:9000 loraplex operators create" in create
    assert "hunter2" not in create
    assert login.endswith("loraplex login --url http://127.0.0.1:9000")


def test_prints_a_key_alone_so_that_scripts_can_take_it(installed: Loraplex) -> None:
    outcome = installed("operators", "create", "root")
    operator = authenticate(outcome.out.removesuffix("\n"))
    assert (operator.name, operator.role) == ("root", OperatorRole.ADMIN)
    assert outcome.out.strip() not in outcome.err
    assert "loraplex login" in outcome.err


def test_makes_an_operator_as_it_is_told(installed: Loraplex) -> None:
    made = installed(
        *("operators", "create", "eve", "--role", "viewer", "--expires-in-days", "7", "--json")
    ).data
    operator = authenticate(made["key"])
    assert (operator.name, operator.role) == ("eve", OperatorRole.VIEWER)
    assert operator.expires_at is not None
    left = operator.expires_at - utc_now()
    assert timedelta(days=6) < left <= timedelta(days=7)


def test_offers_a_link_by_which_the_operator_sets_a_password(
    installed: Loraplex, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_URL", "https://llm.example")
    url = installed("operators", "create", "eve", "--json").data["console"]
    before, _, token = url.partition("#")
    assert before == "https://llm.example/console/join"
    database = Database(f"sqlite:///{data_dir / 'loraplex.db'}")
    with database.platform_transaction(read_only=True) as session:
        holder = AccountService().find_invited(session, token)
    database.close()
    assert holder.operator is not None
    assert holder.operator.name == "eve"


def test_writes_into_the_audit_log_whom_it_made(installed: Loraplex, data_dir: Path) -> None:
    installed("operators", "create", "root")
    database = Database(f"sqlite:///{data_dir / 'loraplex.db'}")
    with database.platform_transaction(read_only=True) as session:
        entry = session.scalars(select(PlatformAuditEntry)).one()
    database.close()
    assert (entry.action, entry.resource, entry.actor_name) == ("operator.create", "root", "system")


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (["no-such-command"], 2),
        (["operators", "create"], 2),
        (["operators", "create", "Not A Name"], 2),
        (["operators", "create", "root", "--role", "owner"], 2),
        (["operators", "create", "root", "--expires-in-days", "0"], 2),
        (["operators", "create", "root", "--tenant", "acme"], 2),
        (["operators", "create", "taken"], 5),
        (["operators", "create", "root", "--database", "sqlite:////no/such/folder/x.db"], 7),
    ],
)
def test_says_by_its_exit_code_what_went_wrong(
    installed: Loraplex, arguments: list[str], exit_code: int
) -> None:
    installed("operators", "create", "taken")
    outcome = installed(*arguments)
    assert (outcome.exit_code, outcome.out) == (exit_code, "")
    assert outcome.err


def test_refuses_a_secret_that_others_may_read(installed: Loraplex, data_dir: Path) -> None:
    installed("operators", "create", "root")
    (data_dir / "secret").chmod(0o644)
    outcome = installed("operators", "create", "eve")
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert "chmod 600" in outcome.err


def test_takes_the_secret_from_the_environment(
    installed: Loraplex, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_SECRET", "ab" * 32)
    text = installed("operators", "create", "root").out.strip()
    assert authenticate(text).name == "root"
    assert not (data_dir / "secret").exists()
    assert "ab" * 32 not in repr(Settings())


def test_an_earlier_secret_goes_on_to_verify(
    installed: Loraplex, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = installed("operators", "create", "root").out.strip()
    (data_dir / "secret").rename(data_dir / "secret.previous")
    assert authenticate(text).name == "root"
    assert (data_dir / "secret").read_text() != (data_dir / "secret.previous").read_text()
    monkeypatch.setenv("LORAPLEX_SECRET_PREVIOUS", "ab" * 32)
    with pytest.raises(InvalidApiKey):
        authenticate(text)


def test_shows_what_each_secret_is_needed_for(installed: Loraplex, data_dir: Path) -> None:
    text = installed("operators", "create", "root").out.strip()
    (before,) = installed("db", "secrets", "--json").data
    assert (before["status"], before["operator_keys"]) == ("present", 1)
    (data_dir / "secret").rename(data_dir / "secret.previous")
    installed("operators", "create", "eve")
    rows = {row["status"]: row for row in installed("db", "secrets", "--json").data}
    assert rows["previous"] == {**before, "status": "previous"}
    assert (rows["present"]["operator_keys"], rows["present"]["audit_entries"]) == (1, 1)
    (data_dir / "secret.previous").unlink()
    assert "missing" in installed("db", "secrets").out
    with pytest.raises(InvalidApiKey):
        authenticate(text)


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
