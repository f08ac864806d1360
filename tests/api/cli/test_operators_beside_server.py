"""`operators create` uses the data of the running server, never a second database."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from loraplex.api.cli.admin import settings_beside_server
from loraplex.api.cli.exit_codes import CommandFailed
from loraplex.api.server.running_servers import RunningServer, registered
from loraplex.api.settings import load_settings

URL = "http://127.0.0.1:8000"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("LORAPLEX_DATA_DIR", "LORAPLEX_DATABASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    return tmp_path


def run_server(stack: ExitStack, data_dir: Path, *, embedded: bool = True) -> None:
    stack.enter_context(registered(RunningServer(URL, str(data_dir), embedded)))


def test_the_data_folder_of_the_one_server_is_used(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        run_server(stack, home / "elsewhere")
        settings = settings_beside_server(load_settings())
    assert settings.data_dir == home / "elsewhere"
    assert f"Using {home / 'elsewhere'}" in capsys.readouterr().err


def test_without_a_server_the_default_folder_is_used(home: Path) -> None:
    settings = settings_beside_server(load_settings())
    assert settings.data_dir == home / "share" / "loraplex"


def test_a_folder_that_is_named_is_used_whatever_runs(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        run_server(stack, home / "elsewhere")
        named = settings_beside_server(load_settings(data_dir=home / "named"))
        assert named.data_dir == home / "named"
        monkeypatch.setenv("LORAPLEX_DATA_DIR", str(home / "environment"))
        assert settings_beside_server(load_settings()).data_dir == (home / "environment")


def test_a_database_that_the_server_was_given_has_to_be_named(home: Path) -> None:
    with ExitStack() as stack:
        run_server(stack, home / "elsewhere", embedded=False)
        with pytest.raises(CommandFailed, match="add the same --database"):
            settings_beside_server(load_settings())


def test_of_several_servers_one_has_to_be_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        for number, name in enumerate(("one", "an other")):
            monkeypatch.setattr("os.getpid", lambda number=number: number)
            run_server(stack, home / name)
        with pytest.raises(CommandFailed, match="2 servers run here") as caught:
            settings_beside_server(load_settings())
    assert f"--data-dir '{home}/an other'" in str(caught.value)
