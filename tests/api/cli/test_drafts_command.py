"""`loraplex drafts train`: from a file of texts to heads that the server accepts."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from loraplex.api import cli
from loraplex.api.cli import drafts
from loraplex.api.cli.drafts import app
from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.demo.manifest import WEIGHTS
from loraplex.engine.checkpoint.base_identity import compute_base_id
from loraplex.engine.speculation.eagle_checkpoint import load_head
from loraplex.engine.speculation.medusa_checkpoint import load_heads
from support.eagle import save_random_head
from support.medusa import write_demo_texts

BASE = WEIGHTS / "base"
DOCS = Path(__file__).parents[3] / "docs"
PAGES = (DOCS / "medusa.md", DOCS / "eagle.md")


def train(
    monkeypatch: pytest.MonkeyPatch, data: Path, out: Path, *options: str, kind: str = "medusa"
) -> int:
    arguments = ("--model", str(BASE), "--data", str(data), "--out", str(out), *options)
    monkeypatch.setattr("sys.argv", ["loraplex", "drafts", "train", "--kind", kind, *arguments])
    try:
        return cli.main()
    except SystemExit as exc:
        return int(exc.code or 0)


def test_writes_heads_that_fit_the_base(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data, out = write_demo_texts(tmp_path / "texts.jsonl", 40), tmp_path / "heads"
    options = ("--heads", "2", "--layers", "1", "--steps", "2", "--batch-size", "2")
    assert train(monkeypatch, data, out, *options) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "head 2: " in printed
    assert f"--speculation medusa:{out}" in printed
    heads = load_heads(
        out,
        hidden_size=128,
        vocab_size=2048,
        base_id=compute_base_id(BASE),
        dtype=torch.float32,
    )
    assert heads.num_heads == 2


def test_writes_an_eagle_head_that_fits_the_base(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data, out = write_demo_texts(tmp_path / "texts.jsonl", 40), tmp_path / "head"
    options = ("--depth", "2", "--draft-vocab-size", "500", "--steps", "2", "--batch-size", "2")
    assert train(monkeypatch, data, out, *options, kind="eagle") == ExitCode.OK
    printed = capsys.readouterr().out
    assert "draft token 2: " in printed
    assert f"--speculation eagle:{out}" in printed
    loaded = load_head(
        out,
        hidden_size=128,
        vocab_size=2048,
        num_layers=4,
        base_id=compute_base_id(BASE),
        dtype=torch.float32,
    )
    assert loaded.layers == (1, 2, 4)
    assert len(loaded.head.token_ids) == 500


def test_a_head_trained_further_under_an_adapter_keeps_its_features_and_draft_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = write_demo_texts(tmp_path / "texts.jsonl", 40)
    short = ("--steps", "2", "--batch-size", "2", "--device", "cpu")
    first, plain, adapted = (tmp_path / name for name in ("first", "plain", "adapted"))
    options = ("--draft-vocab-size", "500", *short)
    assert train(monkeypatch, data, first, *options, kind="eagle") == ExitCode.OK
    further = ("--start-from", str(first), *short)
    assert train(monkeypatch, data, plain, *further, kind="eagle") == ExitCode.OK
    under = ("--adapter", str(WEIGHTS / "pirate"))
    assert train(monkeypatch, data, adapted, *further, *under, kind="eagle") == ExitCode.OK
    tensors, *others = (load_file(path / "model.safetensors") for path in (first, plain, adapted))
    changed = {"lm_head.weight", "midlayer.mlp.up_proj.weight", "norm.weight"}
    for other in others:
        assert all(torch.equal(tensors[name], other[name]) for name in ("fc.weight", "d2t"))
        assert not any(torch.equal(tensors[name], other[name]) for name in changed)
    # The adapter makes a difference to what is learned of the same texts.
    assert not any(torch.equal(others[0][name], others[1][name]) for name in changed)


def test_medusa_heads_learn_under_an_adapter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = write_demo_texts(tmp_path / "texts.jsonl", 10)
    options = ("--heads", "1", "--steps", "1", "--batch-size", "2", "--device", "cpu")
    outs = [tmp_path / "plain", tmp_path / "adapted"]
    assert train(monkeypatch, data, outs[0], *options) == ExitCode.OK
    under = ("--adapter", str(WEIGHTS / "sql"))
    assert train(monkeypatch, data, outs[1], *options, *under) == ExitCode.OK
    plain, adapted = (load_file(next(out.glob("*.safetensors"))) for out in outs)
    assert any(not torch.equal(plain[name], adapted[name]) for name in plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--start-from", str(BASE)), "it has more than one layer"),
        (("--adapter", str(BASE)), "adapter_config.json cannot be read"),
        (("--start-from", str(BASE), "--draft-vocab-size", "9"), "is an option of a new head"),
    ],
)
def test_what_cannot_be_trained_from_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: tuple[str, ...],
    message: str,
) -> None:
    data = write_demo_texts(tmp_path / "texts.jsonl", 2)
    assert train(monkeypatch, data, tmp_path / "head", *options, kind="eagle") == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_an_adapter_without_peft_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(drafts, "find_spec", lambda _: None)
    data = write_demo_texts(tmp_path / "texts.jsonl", 2)
    options = ("--adapter", str(WEIGHTS / "sql"))
    assert train(monkeypatch, data, tmp_path / "head", *options) == ExitCode.FAILED
    assert "pip install 'loraplex[engine,tune]'" in capsys.readouterr().err


def attach(monkeypatch: pytest.MonkeyPatch, head: Path, adapter: Path, out: Path) -> int:
    options = ["--model", str(BASE), "--out", str(out)]
    monkeypatch.setattr(
        "sys.argv", ["loraplex", "drafts", "attach", *map(str, (head, adapter)), *options]
    )
    try:
        return cli.main()
    except SystemExit as exc:
        return int(exc.code or 0)


def test_an_adapter_with_its_head_attached_is_still_an_adapter_for_peft(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    head, adapter, out = tmp_path / "head", WEIGHTS / "pirate", tmp_path / "adapter"
    save_random_head(BASE, head, layers=(1, 2, 4))
    assert attach(monkeypatch, head, adapter, out) == ExitCode.OK
    assert f"loraplex adapters push {out}" in capsys.readouterr().out
    before, after = (load_file(path / "adapter_model.safetensors") for path in (adapter, out))
    ((name, values),) = ((name, after[name]) for name in after.keys() - before.keys())
    assert re.fullmatch(r"base_model\.model\.draft_head\.[0-9a-f]{64}", name)
    expected = load_file(head / "model.safetensors")
    own = {name for name in expected if name not in ("fc.weight", "d2t", "t2d")}
    assert values.numel() == sum(expected[name].numel() for name in own)
    assert values.dtype == next(iter(before.values())).dtype, "the block keeps its dtype"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        base = AutoModelForCausalLM.from_pretrained(BASE)
        tuned = PeftModel.from_pretrained(base, str(out)).state_dict()
    for name in before:
        kept = tuned[name.replace(".weight", ".default.weight")]
        assert torch.equal(kept, before[name].to(kept.dtype))


def test_no_head_is_attached_to_what_is_no_adapter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    head = tmp_path / "head"
    save_random_head(BASE, head, layers=(1, 2, 4))
    assert attach(monkeypatch, head, head, tmp_path / "out") == ExitCode.USAGE
    assert "adapter_model.safetensors" in capsys.readouterr().err
    assert attach(monkeypatch, WEIGHTS / "sql", WEIGHTS / "sql", tmp_path / "out") == ExitCode.USAGE
    assert "config.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "option", "other"),
    [
        ("eagle", "--heads", "medusa"),
        ("medusa", "--draft-vocab-size", "eagle"),
    ],
)
def test_an_option_of_the_other_kind_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    kind: str,
    option: str,
    other: str,
) -> None:
    data, out = write_demo_texts(tmp_path / "texts.jsonl", 2), tmp_path / "head"
    assert train(monkeypatch, data, out, option, "4", kind=kind) == ExitCode.USAGE
    assert f"{option} is an option of --kind {other}" in capsys.readouterr().err
    assert not out.exists()


def test_names_the_line_that_is_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "You asked me to list"}\n{"words": 1}\n')
    assert train(monkeypatch, data, tmp_path / "heads") == ExitCode.USAGE
    assert "line 2" in capsys.readouterr().err
    assert not (tmp_path / "heads").exists()


def test_names_the_line_that_is_not_utf8(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_bytes(b'{"text": "You asked me to list"}\n{"text": "caf\xe9 au lait"}\n')
    assert train(monkeypatch, data, tmp_path / "heads") == ExitCode.USAGE
    assert "line 2" in capsys.readouterr().err


def test_overwrites_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = write_demo_texts(tmp_path / "texts.jsonl", 2)
    assert train(monkeypatch, data, tmp_path) == ExitCode.CONFLICT
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [data.name]


def test_every_option_is_told_of() -> None:
    command: Any = typer.main.get_command(app)
    options = {option for param in command.commands["train"].params for option in param.opts}
    told = {name for page in PAGES for name in re.findall(r"--[a-z][a-z-]+", page.read_text())}
    assert options - told == set()
    others = {
        "--adapter-draft-heads",
        "--kv-dtype",
        "--max-model-len",
        "--name",
        "--quantize",
        "--speculation",
        "--tensor-parallel-size",
        "--pipeline-parallel-size",
    }
    assert told - options == others
