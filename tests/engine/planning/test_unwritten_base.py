"""A configuration without weights is planned as the base that it describes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.errors import BaseNotFound, UnsupportedModel
from loraplex.engine.model.expected_base import ExpectedBase, expect_base
from loraplex.engine.planning.unwritten_base import planned_base
from support.families import SERVED, STATES, save_family
from support.marks import marked_slow

FAMILIES = (
    "llama",
    "mixtral",
    "deepseek_v3-mla",
    "gpt2-conv1d",
    "gemma",
    "gpt_oss-sinks-window",
    "qwen3_5",
)


def expect(model: str, quantization: Quantization, device: str) -> ExpectedBase:
    config = EngineConfig(model, quantization=quantization, device=device)
    return expect_base(config, torch.device(device))


@pytest.mark.parametrize("family", marked_slow(FAMILIES, slow=FAMILIES[4:]))
def test_the_configuration_alone_tells_what_the_whole_folder_tells(
    family: str, tmp_path: Path
) -> None:
    whole, bare = save_family(tmp_path / "whole", *{**SERVED, **STATES}[family]), tmp_path / "bare"
    bare.mkdir()
    shutil.copy(whole / "config.json", bare)
    for quantization, device in ((Quantization.NONE, "cpu"), (Quantization.INT4, "cuda")):
        expected = expect(str(whole), quantization, device)
        for given in (bare, bare / "config.json"):
            with planned_base(str(given)) as model:
                found = expect(model, quantization, device)
            assert not Path(model).exists(), "the folder is there until the end only"
            assert found.weight_bytes == expected.weight_bytes
            assert found.file_bytes == expected.file_bytes
            assert found.kv_shapes == expected.kv_shapes
            assert found.projections == expected.projections


def test_a_folder_with_weights_is_planned_itself(tiny_base: Path) -> None:
    with planned_base(str(tiny_base)) as model:
        assert Path(model) == tiny_base


def test_of_a_hub_id_the_configuration_alone_is_downloaded(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(_model: str, *, allow_patterns: list[str]) -> str:
        assert "*.safetensors" not in allow_patterns
        shutil.copy(tiny_base / "config.json", tmp_path)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with planned_base("owner/name") as model:
        found = expect(model, Quantization.NONE, "cpu")
    expected = expect(str(tiny_base), Quantization.NONE, "cpu")
    assert found.weight_bytes == expected.weight_bytes


def test_the_weights_take_no_room_on_the_disk(tiny_base: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_base / "config.json").read_text())
    config |= {"num_hidden_layers": 4, "hidden_size": 8192, "intermediate_size": 65536}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with planned_base(str(tmp_path)) as model:
        size = (Path(model) / "model.safetensors").stat()
    assert size.st_size > 1 << 30
    assert size.st_blocks * 512 < 1 << 20


def test_a_configuration_of_quantized_weights_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = pytest.raises(UnsupportedModel, match="their sizes are known from the files")
    with expected, planned_base(str(tmp_path)):
        pass


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaseNotFound, match=r"has no config\.json"), planned_base(str(tmp_path)):
        pass
