"""What is taken for a base model, and what is told of everything else."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from loraplex.engine.checkpoint import locate_model
from loraplex.engine.errors import UnsupportedModel


@pytest.mark.parametrize("model", ["./nowhere", "~/nowhere", "/no/where", "nowhere", "a/b/c"])
def test_a_path_is_never_asked_of_the_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pytest.fail)
    with pytest.raises(UnsupportedModel, match=f"{model} is no folder here"):
        locate_model(model)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionError("no route\nto the host"), "no route$"),
        (huggingface_hub.errors.HFValidationError("bad name"), "bad name$"),
        (RuntimeError(), "RuntimeError$"),
    ],
)
def test_the_hubs_refusal_is_passed_on_in_one_line(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_model: str, **_options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UnsupportedModel, match=f"owner/name .* did not give it: {reason}"):
        locate_model("owner/name")


def test_a_folder_of_a_model_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert locate_model(str(tmp_path)) == tmp_path


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"{tmp_path} has no config.json"):
        locate_model(str(tmp_path))


def test_an_adapter_is_told_from_a_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(UnsupportedModel, match="serve its base, then push"):
        locate_model(str(tmp_path))
