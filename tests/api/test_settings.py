"""Settings mean the same in every child process."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.api.settings import Settings, load_settings


@pytest.mark.parametrize("given", ["data", "./data", "my data", "../other/data"])
def test_a_relative_data_folder_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    settings = load_settings(data_dir=Path(given))
    monkeypatch.chdir("/")
    assert settings.data_dir.is_absolute()
    assert settings.prepare_data_dir().resolve() == (here / given).resolve()
    assert settings.store_url.startswith("file:///")


def test_a_data_folder_of_the_environment_is_absolute_and_in_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LORAPLEX_DATA_DIR", "~/loraplex")
    assert Settings().data_dir == tmp_path / "loraplex"
