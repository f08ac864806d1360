"""The errors of `loraplex serve` for a damaged folder or database."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loraplex.api.cli import main
from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.telemetry import logs
from support.base_folders import BASE_FOLDERS, Templates, make_base_folder

BY_NAME = {case.name: case for case in BASE_FOLDERS}


def serve(base: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """`loraplex serve` in this process, the engine in its own."""
    monkeypatch.setattr(logs, "configure_logging", lambda *options: None)
    arguments = ("--model", str(base), "--data-dir", str(data_dir), "--port", "0", *options)
    monkeypatch.setattr(sys, "argv", ["loraplex", "serve", *arguments])
    return main()


def the_error(capfd: pytest.CaptureFixture[str]) -> str:
    """The one `Error:` line. Fails if there is another, or a traceback."""
    output = capfd.readouterr().err
    assert "Traceback" not in output
    (line,) = (line for line in output.splitlines() if line.startswith("Error: "))
    return line


@pytest.mark.parametrize("name", ["half-a-file", "tokenizer-damaged"])
def test_a_bad_folder_is_refused_before_the_engine_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    base, data_dir = tmp_path / "base", tmp_path / "data"
    make_base_folder(BY_NAME[name], Templates(tmp_path / "templates"), base)
    assert serve(base, data_dir, monkeypatch) == ExitCode.USAGE
    assert the_error(capfd).endswith(f"({BY_NAME[name].code})")
    assert not (data_dir / "tokens.journal").exists()


@pytest.mark.slow
def test_missing_weights_are_named_when_the_engine_has_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    make_base_folder(BY_NAME["layer-missing"], Templates(tmp_path / "templates"), base)
    assert serve(base, tmp_path / "data", monkeypatch, "--num-threads", "1") == ExitCode.USAGE
    line = the_error(capfd)
    assert "lack model.layers.1.input_layernorm.weight and 8 more tensors" in line
    assert line.endswith("(base_weights_missing)")


@pytest.mark.parametrize("option", ["--reference-base", "--speculation=draft"])
def test_the_other_models_are_checked_before_the_engine_starts(
    option: str,
    tiny_base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    damaged = tmp_path / "damaged"
    make_base_folder(BY_NAME["shard-missing"], Templates(tmp_path / "templates"), damaged)
    options = [f"{option}:{damaged}"] if "=" in option else [option, str(damaged)]
    assert serve(tiny_base, tmp_path / "data", monkeypatch, *options) == ExitCode.USAGE
    line = the_error(capfd)
    assert str(damaged) in line
    assert line.endswith("(base_damaged)")


def test_a_damaged_database_is_named(
    tiny_base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "data" / "loraplex.db"
    path.parent.mkdir()
    path.write_bytes(b"not a database")
    assert serve(tiny_base, path.parent, monkeypatch) == ExitCode.UNAVAILABLE
    line = the_error(capfd)
    assert f"{path}: file is not a database; restore it from a backup" in line
