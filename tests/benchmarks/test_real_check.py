"""`make real-check` on a made model: it passes, and notices another adapter and a refused one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.real_check import BOUNDS, check, main

from support.models import make_adapter, make_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(model, tmp_path_factory.mktemp("adapter"), seed=1)


def run(monkeypatch: pytest.MonkeyPatch, model: Path, adapter: Path) -> int:
    options = ["--model", str(model), "--adapter", str(adapter)]
    monkeypatch.setattr("sys.argv", ["real_check", *options])
    return main()


def test_a_made_model_and_its_adapter_are_within_the_bound(
    model: Path,
    adapter: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, model, adapter) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_good"]
    for who in ("base", "adapter"):
        assert found[who]["num_tokens"] == 4 * 32
        assert found[who]["largest"] <= BOUNDS["float32"]


def test_another_adapter_is_noticed_and_the_base_is_not_blamed(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    other = make_adapter(model, tmp_path / "other", seed=2)
    found = check(model, adapter, reference=other, dtype="float32")
    assert found["adapter"]["largest"] > BOUNDS["float32"]
    assert found["base"]["largest"] <= BOUNDS["float32"]


def test_an_adapter_that_is_not_served_is_reported_with_its_code(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    adapter = make_adapter(model, tmp_path / "adapter", seed=1)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "IA3"}))
    assert run(monkeypatch, model, adapter) == 1
    assert json.loads(capsys.readouterr().out)["code"]
