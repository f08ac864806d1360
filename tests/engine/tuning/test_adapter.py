"""The files of a trained adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

from loraplex.engine.tuning.adapter import CONFIG_FILE, WEIGHTS_FILE, save_adapter
from support.synced import record_synced


def test_a_saved_adapter_is_on_the_disk_under_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = get_peft_model(nn.Sequential(nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
    synced = record_synced(monkeypatch)
    renamed: list[int] = []
    replace = Path.replace

    def note(path: Path, target: Path) -> Path:
        renamed.append(len(synced))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", note)
    save_adapter(model, tmp_path, base_name="base")
    assert {path.name for path in tmp_path.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}
    names = {path.name for path in synced[: renamed[0]]}
    assert names >= {CONFIG_FILE, WEIGHTS_FILE}, "before they have their names"
    assert synced[renamed[-1] :] == [tmp_path], "after they have their names"
