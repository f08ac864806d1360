"""`loraplex login`, `whoami`, `tenants`, `operators`, `users` and `keys`, with a running server."""

from __future__ import annotations

import io
import json
import stat
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from loraplex.api import cli
from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.client.profiles import Profile, config_path, load_profiles, save_profile
from support.browser import Browser
from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest, child_environment

_numbers = count(1)


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
def loraplex(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Loraplex:
    """The command within this process, as somebody who has no profile yet."""
    for name in ("URL", "API_KEY", "TENANT", "PROFILE"):
        monkeypatch.delenv(f"LORAPLEX_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def run(*arguments: str, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["loraplex", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            exit_code = cli.main()
        except SystemExit as exc:
            exit_code = int(exc.code or 0)
        return Outcome(exit_code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def admin_key(server: ServerUnderTest) -> str:
    return server.make_operator("admin-of-commands")


@pytest.fixture
def slug() -> str:
    return f"commands-{next(_numbers)}"


@pytest.fixture
def operator(loraplex: Loraplex, server: ServerUnderTest, admin_key: str, slug: str) -> Loraplex:
    """The command of an operator who is logged in, and a tenant."""
    assert loraplex("login", "--url", server.url, stdin=admin_key).exit_code == 0
    assert loraplex("tenants", "create", slug).exit_code == 0
    return loraplex


# --- who calls whom -----------------------------------------------------------------------------


def test_a_login_is_remembered_for_its_owner_alone_until_the_logout(
    loraplex: Loraplex, resident: Caller
) -> None:
    done = loraplex("login", "--url", f"{resident.url}/v1", stdin=f"{resident.key}\n")
    assert (done.exit_code, done.out) == (0, "")
    assert resident.key not in done.err
    assert stat.S_IMODE(config_path().stat().st_mode) == 0o600
    assert load_profiles() == {"default": Profile(resident.url, resident.key)}
    me = loraplex("whoami", "--json").data
    assert (me["tenant"]["slug"], me["actor"]["kind"]) == ("resident", "key")
    assert "resident" in loraplex("whoami").out
    assert loraplex("logout").exit_code == 0
    assert loraplex("whoami").exit_code == ExitCode.AUTHENTICATION
    assert loraplex("logout").exit_code == ExitCode.NOT_FOUND
    assert resident.key not in config_path().read_text()


def test_a_key_that_the_server_refuses_is_not_remembered(
    loraplex: Loraplex, server: ServerUnderTest
) -> None:
    for key, expected in (("nonsense", 3), ("", 3), ("lpx_live_schlüssel", 3)):
        done = loraplex("login", "--url", server.url, stdin=key)
        assert (done.exit_code, done.out) == (expected, "")
        assert not key or key not in done.err
    assert not config_path().exists()


def test_a_login_takes_the_key_from_the_environment(
    loraplex: Loraplex, resident: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_URL", resident.url)
    monkeypatch.setenv("LORAPLEX_API_KEY", resident.key)
    assert loraplex("login", "--profile", "ci", "--json").data["tenant"]["slug"] == "resident"
    assert set(load_profiles()) == {"ci"}


def test_a_login_prefers_the_key_that_is_piped_in_and_adds_a_profile(
    loraplex: Loraplex,
    resident: Caller,
    caller: Caller,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loraplex.api.cli.login.DEFAULT_URL", resident.url)
    monkeypatch.delenv("LORAPLEX_URL", raising=False)
    monkeypatch.setenv("LORAPLEX_API_KEY", caller.key)
    done = loraplex("login", "--profile", "second", "--json", stdin=f"{resident.key}\n")
    assert done.data["tenant"]["slug"] == "resident"
    assert load_profiles() == {"second": Profile(resident.url, resident.key)}


def test_a_flag_goes_before_the_environment_and_that_before_the_profile(
    loraplex: Loraplex,
    resident: Caller,
    caller: Caller,
    server: ServerUnderTest,
    admin_key: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tenant(*options: str) -> Any:
        return loraplex("whoami", "--json", *options).data["tenant"]["slug"]

    save_profile("default", Profile(server.url, resident.key))
    save_profile("admin", Profile(server.url, admin_key, tenant="resident"))
    assert tenant() == "resident"
    monkeypatch.setenv("LORAPLEX_PROFILE", "admin")
    assert tenant("--tenant", caller.slug) == caller.slug
    monkeypatch.setenv("LORAPLEX_TENANT", caller.slug)
    assert tenant() == caller.slug
    assert tenant("--tenant", "resident") == "resident"
    assert tenant("--profile", "admin") == "resident"
    monkeypatch.delenv("LORAPLEX_TENANT")
    monkeypatch.setenv("LORAPLEX_API_KEY", caller.key)
    monkeypatch.setenv("LORAPLEX_PROFILE", "default")
    assert tenant() == caller.slug
    assert tenant("--profile", "default") == "resident"


def test_a_profiles_key_is_sent_to_its_own_server_only(
    loraplex: Loraplex, resident: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_profile("default", Profile(resident.url, resident.key))
    elsewhere = "http://127.0.0.1:1"
    asked = loraplex("whoami", "--url", elsewhere)
    assert asked.exit_code == ExitCode.AUTHENTICATION
    assert f"No API key for {elsewhere}" in asked.err
    monkeypatch.setenv("LORAPLEX_URL", elsewhere)
    assert loraplex("whoami").exit_code == ExitCode.AUTHENTICATION
    assert loraplex("whoami", "--profile", "default").exit_code == 0


@pytest.mark.parametrize(
    ("content", "mode", "expected"),
    [
        ("[profiles.default]\nurl = 'http://x'\nkey = 'y'\n", 0o644, "chmod 600"),
        ("[profiles", 0o600, "not a valid configuration"),
        ("[profiles.default]\npassword = 'hunter2'\n", 0o600, "not a valid configuration"),
        ("profiles = 3", 0o600, "not a valid configuration"),
    ],
)
def test_refuses_a_file_that_others_may_read_or_that_is_not_ours(
    loraplex: Loraplex, content: str, mode: int, expected: str
) -> None:
    config_path().parent.mkdir(parents=True)
    config_path().write_text(content)
    config_path().chmod(mode)
    outcome = loraplex("whoami")
    assert outcome.exit_code == ExitCode.USAGE
    assert expected in outcome.err
    assert "hunter2" not in outcome.err


def test_profiles_keep_what_is_in_them_whatever_their_values_hold(loraplex: Loraplex) -> None:
    profiles = {
        "default": Profile("http://x", "a\"b\\c'd", "acme"),
        "two.three-4": Profile("http://ü/", "[profiles.x]\nkey", None),
    }
    for name, profile in profiles.items():
        save_profile(name, profile)
    assert load_profiles() == profiles
    assert 'a"b' not in repr(profiles["default"])


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (("whoami", "--profile", "none"), ExitCode.USAGE),
        (("whoami", "--profile", "Not A Name"), ExitCode.USAGE),
        (("whoami", "--url", "ftp://host"), ExitCode.AUTHENTICATION),
        (("tenants", "list"), ExitCode.AUTHENTICATION),
        (("keys", "create", "--scope", "everything"), ExitCode.USAGE),
        (("keys", "create", "--expires-in-days", "0"), ExitCode.USAGE),
        (("tenants", "set", "acme"), ExitCode.USAGE),
        (("tenants", "set", "acme", "--slo", "ttft"), ExitCode.USAGE),
        (("tenants", "set", "acme", "--slo", "tpot=3"), ExitCode.USAGE),
        (("tenants", "set", "acme", "--slo", "ttft=nan"), ExitCode.USAGE),
    ],
)
def test_says_by_its_exit_code_what_went_wrong_before_it_asks(
    loraplex: Loraplex, arguments: tuple[str, ...], exit_code: ExitCode
) -> None:
    outcome = loraplex(*arguments)
    assert (outcome.exit_code, outcome.out) == (exit_code, "")
    assert "Traceback" not in outcome.err


# --- what operators and tenants do --------------------------------------------------------------


def test_a_tenant_is_made_changed_suspended_and_resumed(operator: Loraplex, slug: str) -> None:
    assert operator("tenants", "create", slug).exit_code == ExitCode.CONFLICT
    changed = operator("tenants", "set", slug, "--name", "Acme Ltd", "--weight", "2", "--json")
    assert (changed.data["name"], changed.data["weight"]) == ("Acme Ltd", 2.0)
    assert operator("tenants", "set", slug, "--name", "", "--json").data["name"] is None
    promised = operator("tenants", "set", slug, "--slo", "ttft=2000, itl=80", "--json")
    assert promised.data["slo"] == {"ttft_ms": 2000.0, "itl_ms": 80.0}
    assert "ttft=500" in operator("tenants", "set", slug, "--slo", "ttft=500").out
    removed = operator("tenants", "set", slug, "--slo", "", "--json")
    assert removed.data["slo"] == {"ttft_ms": None, "itl_ms": None}
    assert operator("tenants", "suspend", slug, "--json").data["suspended_at"]
    suspended = operator("tenants", "list", "--suspended", "--json").data
    assert slug in [tenant["slug"] for tenant in suspended]
    assert operator("tenants", "resume", slug, "--json").data["suspended_at"] is None
    header, line = operator("tenants", "show", slug).out.splitlines()
    assert header.split()[:3] == ["slug", "name", "weight"]
    assert line.split()[:3] == [slug, "-", "2.0"]
    assert operator("tenants", "show", "nobody").exit_code == ExitCode.NOT_FOUND
    assert operator("tenants", "create", "Not A Slug").exit_code == ExitCode.USAGE


def test_a_name_cannot_steer_the_terminal(operator: Loraplex, slug: str) -> None:
    operator("tenants", "set", slug, "--name", "\x1b[2Jboo\nfake row")
    printed = operator("tenants", "show", slug).out
    assert "\x1b" not in printed
    assert len(printed.splitlines()) == 2


def test_a_key_is_printed_alone_so_that_scripts_can_take_it(
    operator: Loraplex, server: ServerUnderTest, slug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = operator("keys", "create", "--tenant", slug)
    key = made.out.removesuffix("\n")
    assert key.startswith("lpx_live_")
    assert key not in made.err
    listed = operator("keys", "list", "--tenant", slug)
    assert key.rpartition("_")[2] not in listed.out
    monkeypatch.setenv("LORAPLEX_API_KEY", key)
    monkeypatch.setenv("LORAPLEX_URL", server.url)
    me = operator("whoami", "--json").data
    assert me["tenant"]["slug"] == slug
    assert me["scopes"] == [
        *("adapters:compose", "adapters:read", "adapters:write", "infer", "usage:read")
    ]


def test_a_key_is_issued_rotated_and_revoked_as_it_is_told(operator: Loraplex, slug: str) -> None:
    within = ("--tenant", slug)
    issued = operator(
        *("keys", "create", *within, "--name", "ci", "--scope", "infer", "--adapter", "bot"),
        *("--network", "10.0.0.0/8", "--network", "::1", "--expires-in-days", "7", "--json"),
    ).data
    assert (issued["name"], issued["scopes"], issued["adapters"]) == ("ci", ["infer"], ["bot"])
    assert issued["networks"] == ["10.0.0.0/8", "::1/128"]
    rotated = operator(
        "keys", "rotate", issued["id"], *within, "--overlap-seconds", "60", "--json"
    ).data
    assert (rotated["name"], rotated["adapters"]) == ("ci", ["bot"])
    shown = operator("keys", "show", issued["id"], *within, "--json").data
    assert shown["successor"] == rotated["id"]
    assert shown["expires_at"] < issued["expires_at"]
    assert operator("keys", "revoke", rotated["id"], *within, "--json").data["revoked_at"]
    active = operator("keys", "list", "--active", *within, "--json").data
    assert [key["id"] for key in active] == [issued["id"]]
    missing = operator("keys", "revoke", "0" * 12, *within)
    assert missing.exit_code == ExitCode.NOT_FOUND
    narrow = operator("keys", "create", *within, "--adapter", "bot", "--json").data
    assert narrow["scopes"] == ["adapters:compose", "adapters:read", "adapters:write", "infer"]


def test_a_user_comes_and_goes_by_address(operator: Loraplex, slug: str) -> None:
    within = ("--tenant", slug)
    user = operator("users", "create", "Ada@Example.com", *within, "--json").data
    assert (user["email"], user["role"]) == ("ada@example.com", "viewer")
    assert operator("users", "create", "ada@example.com", *within).exit_code == ExitCode.CONFLICT
    operator("users", "set", "ada@example.com", "--role", "developer", *within)
    assert operator("users", "show", user["id"], *within, "--json").data["role"] == "developer"
    key = operator("keys", "create", "--user", "ada@example.com", *within, "--json").data
    assert key["user"] == user["id"]
    operator("users", "disable", "ada@example.com", *within)
    keys = operator("keys", "list", "--user", "ada@example.com", *within, "--json").data
    assert [entry["revoked_at"] is not None for entry in keys] == [True]
    disabled = operator("users", "list", "--disabled", *within, "--json").data
    assert [entry["email"] for entry in disabled] == ["ada@example.com"]
    enabled = operator("users", "enable", "ada@example.com", *within, "--json").data
    assert enabled["disabled_at"] is None
    nobody = operator("users", "show", "eve@example.com", *within)
    assert nobody.exit_code == ExitCode.NOT_FOUND


def test_an_invitation_is_a_link_that_the_console_takes_once(
    operator: Loraplex, slug: str, server: ServerUnderTest
) -> None:
    operator("users", "create", "ada@example.com", "--tenant", slug)
    operator("operators", "add", slug)
    for command in (
        ("users", "invite", "ada@example.com", "--tenant", slug),
        ("operators", "invite", slug),
    ):
        invited = operator(*command)
        base, _, token = invited.out.strip().partition("#")
        assert base == f"{server.url}/console/join"
        assert token not in invited.err
        browser = Browser(server.url)
        with browser.http:
            assert browser.enrol(token).is_success
            check_envelope(browser.enrol(token), "invitation_ended")


def test_an_operator_comes_and_goes(operator: Loraplex, slug: str) -> None:
    added = operator("operators", "add", slug, "--json").data
    assert added["role"] == "viewer"
    key = operator("operators", "keys", "create", slug, "--json").data
    assert key["key"].startswith("lpx_admin_")
    assert operator("operators", "set", slug, "--role", "admin", "--json").data["role"] == "admin"
    revoked = operator("operators", "keys", "revoke", slug, key["id"], "--json").data
    assert revoked["revoked_at"]
    assert operator("operators", "disable", slug, "--json").data["disabled_at"]
    assert slug in operator("operators", "list").out
    assert key["id"] in operator("operators", "keys", "list", slug).out
    own = operator("operators", "disable", "admin-of-commands")
    assert own.exit_code == ExitCode.AUTHENTICATION


# --- what holds for all of them -----------------------------------------------------------------


def leaves(command: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every command below this one that is run, by its words."""
    below = getattr(command, "commands", None)
    if below is None:
        return [(path, command)]
    return [leaf for name, each in below.items() for leaf in leaves(each, (*path, name))]


WITHOUT_SERVER = {("fleet", name) for name in ("certificates", "up", "scale", "down")}


@pytest.mark.parametrize("name", sorted(cli.ASKING_A_SERVER))
def test_every_command_that_asks_a_server_can_be_told_which(name: str) -> None:
    for path, command in leaves(cli.load_command(name), (name,)):
        names = [parameter.name for parameter in command.params]
        works_on_the_database = "database" in names
        is_local = works_on_the_database or path in WITHOUT_SERVER
        for option in ("profile", "url"):
            assert names.count(option) == (0 if is_local else 1), path


def test_no_key_is_taken_from_the_command_line() -> None:
    for name in cli.COMMANDS:
        for path, command in leaves(cli.load_command(name), (name,)):
            for parameter in command.params:
                assert parameter.name not in ("key", "api_key", "password", "secret") or (
                    parameter.envvar and path[0] == "bench"
                ), path


@pytest.mark.parametrize(
    ("words", "expected"),
    [("loraplex ke", {"keys"}), ("loraplex keys cr", {"create"}),
     ("loraplex keys create --sco", {"--scope"}), ("loraplex operators keys re", {"revoke"})],
)  # fmt: skip
def test_the_shell_completes_commands_and_options(words: str, expected: set[str]) -> None:
    script = "from loraplex.api.cli import app; app(prog_name='loraplex')"
    environment = {
        "_LORAPLEX_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert set(done.stdout.split()) == expected, done.stderr
