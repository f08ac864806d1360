"""Which folders are accepted as base models, and the errors for all others."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError

from loraplex.engine.checkpoint.files import local_folder, locate_base
from loraplex.engine.errors import CompositeBase, UnsupportedModel


@pytest.mark.parametrize("model", ["./nowhere", "~/nowhere", "/no/where", "nowhere", "a/b/c"])
def test_a_path_is_never_asked_of_the_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pytest.fail)
    with pytest.raises(UnsupportedModel, match=f"{model} is neither a local directory"):
        locate_base(model)


def test_a_folder_is_the_same_from_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    folder = local_folder("base")
    monkeypatch.chdir("/")
    assert folder == tmp_path / "base"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionError("no route\nto the host"), "no route$"),
        (HFValidationError("bad name"), "bad name$"),
        (RuntimeError(), "RuntimeError$"),
    ],
)
def test_the_hubs_refusal_is_passed_on_in_one_line(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_model: str, **_options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UnsupportedModel, match=f"owner/name .* could not be downloaded: {reason}"):
        locate_base("owner/name")


def test_a_hub_models_configuration_is_checked_before_its_weights_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(_model: str, *, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        (tmp_path / "config.json").write_text('{"model_type": "x", "vision_config": {"a": 1}}')
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CompositeBase):
        locate_base("owner/name")
    assert len(asked) == 1
    assert "*.safetensors" not in asked[0]


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UnsupportedModel, match=r"is a file: give the folder"):
        locate_base(str(tmp_path / "model.safetensors"))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"{tmp_path} has no config.json"):
        locate_base(str(tmp_path))


def test_an_adapter_is_told_from_a_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(UnsupportedModel, match="serve its base, then push"):
        locate_base(str(tmp_path))
