"""`loraplex quantize`: what it prints, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.api import cli
from loraplex.api.cli.exit_codes import ExitCode
from loraplex.engine.calibration import quantization
from loraplex.engine.calibration.output_folder import OutputFolder
from support.calibration import save_with_tokenizer, write_text

SMALL = ("--samples", "4", "--seq-len", "16", "--group-size", "32")


def quantize(
    monkeypatch: pytest.MonkeyPatch, model: Path, out: Path, text: Path, *options: str
) -> int:
    arguments = ["loraplex", "quantize", str(model), str(out), "--text", str(text)]
    monkeypatch.setattr("sys.argv", [*arguments, *SMALL, *options])
    try:
        return cli.main()
    except SystemExit as exc:
        return int(exc.code or 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_with_tokenizer(tmp_path / "model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def test_prints_errors_sizes_and_predictions(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    text: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    options = ("--format", "fp8", "--method", "rtn", "--exclude", "*.o_proj")
    assert quantize(monkeypatch, model, out, text, *options) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "layer 2: relative output error " in printed
    left = "model.layers.*.self_attn.o_proj (2), lm_head"
    assert f"12 linear layers quantized; left as they are: {left}\n" in printed
    assert "KL divergence 0." in printed
    assert f"loraplex serve --model {out}" in printed
    assert (out / "config.json").exists()


@pytest.mark.slow
def test_prints_how_many_matrices_of_experts_are_quantized(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    model = save_with_tokenizer(tmp_path / "moe", "mixtral")
    options = ("--method", "rtn", "--exclude", "*.experts.*.w2")
    assert quantize(monkeypatch, model, tmp_path / "out", text, *options) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "8 linear layers and 16 matrices of experts quantized; " in printed
    assert "model.layers.*.block_sparse_moe.experts.*.w2 (8)" in printed


def test_a_full_disk_and_an_interruption_say_how_to_continue(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    text: Path,
    tmp_path: Path,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(OutputFolder, "free_bytes", lambda _self: 1000)
        assert quantize(monkeypatch, model, tmp_path / "out", text) == ExitCode.FAILED
    assert "No space left on device. The same command continues" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(quantization, "compare", interrupt)
        assert quantize(monkeypatch, model, tmp_path / "out", text) == ExitCode.INTERRUPTED
    assert "The same command continues" in capsys.readouterr().err
    assert quantize(monkeypatch, model, tmp_path / "out", text) == ExitCode.OK


def interrupt(*_arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("content", [None, b"caf\xe9 au lait", b"too short"])
def test_names_a_text_that_is_none(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    tmp_path: Path,
    content: bytes | None,
) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    assert quantize(monkeypatch, model, tmp_path / "out", text) == ExitCode.USAGE
    assert "text" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
