"""`loraplex adapters validate` gives the same verdict as the server's intake."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.examination import examine
from loraplex.adapters.layout import BaseLayout
from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.local.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from loraplex.engine.config import EngineConfig
from loraplex.engine.model.whole_base import load_base_model
from support.broken_adapters import BROKEN, SERVED
from support.command import Command
from support.families import SERVED as FAMILIES
from support.families import save_family
from support.http_uploads import commit, open_upload, put
from support.models import make_adapter, make_tiny_llama
from support.server import Caller, child_environment


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caller: Caller
) -> Command:
    return Command(monkeypatch, capsys, caller)


def copy_config(base: Path, directory: Path) -> Path:
    """The base's configuration alone."""
    return Path(shutil.copy(base / "config.json", directory / "base-config.json"))


ONE_OF_EACH_OUTCOME = {(kind.expected, kind.is_base_tied): name for name, kind in BROKEN.items()}
"""The other kinds are tried where intake itself is: in `tests/adapters/test_broken_adapters.py`."""


@pytest.mark.parametrize("name", ONE_OF_EACH_OUTCOME.values())
def test_a_broken_adapter_is_judged_offline_as_by_the_server(
    command: Command, tiny_base: Path, tmp_path: Path, name: str
) -> None:
    kind = BROKEN[name]
    folder = tmp_path / "adapter"
    base = tiny_base
    if kind.is_base_tied:
        base = make_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of some of what is to be shown here
        kind.make(base, folder)
    # Whether a copy of the base's own matrix is one, only the base's weights can tell.
    reference = base if kind.is_base_tied else copy_config(base, tmp_path)
    options = ("--base", str(reference), "--dtype", kind.serving_dtype, "--json")
    code, out, _ = command("validate", str(folder), *options)
    if kind.expected == SERVED:
        assert code == ExitCode.OK, out
        assert json.loads(out)["accepted"] is True
        return
    assert code == ExitCode.INVALID_ADAPTER
    if out:  # what is no adapter's folder at all is refused before it is examined
        answer = json.loads(out)
        assert answer["code"] == kind.expected
        assert (answer["param"] or "").startswith(kind.pointer)
        assert answer["way_out"]


def test_the_server_says_the_same_at_the_push(
    command: Command, caller: Caller, adapters: list[Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(adapters[0], tmp_path / "adapter"))
    accepted = command.ask("validate", str(folder))
    pushed = caller.push(folder, "bot")
    assert accepted["report"]["digest"] == pushed["digest"]
    assert accepted["report"] == pushed["report"]

    tensors = load_file(folder / WEIGHTS_FILE)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name][:, :-1].copy()}, folder / WEIGHTS_FILE)
    code, out, _ = command("validate", str(folder), "--json")
    upload = open_upload(caller, folder)
    put(caller, upload, (folder / WEIGHTS_FILE).read_bytes(), 0)
    refused = commit(caller, upload).json()["error"]
    answer = json.loads(out)
    assert code == ExitCode.INVALID_ADAPTER
    assert {key: answer[key] for key in ("code", "message", "param")} == {
        key: refused[key] for key in ("code", "message", "param")
    }
    code, _, err = command("push", str(folder), "bot")
    assert (code, answer["way_out"] in err) == (ExitCode.INVALID_ADAPTER, True)


# That the two layouts are equal, in every family, is shown by `tests/engine/test_skeleton.py`.
@pytest.mark.parametrize(
    ("family", "target"),
    [
        ("gpt2-conv1d", "c_attn"),
        ("phi3-fused", "qkv_proj"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gpt_neox", "query_key_value"),
                ("gemma3-window", "q_proj"),
                ("opt", "fc1"),
                ("starcoder2", "c_proj"),
            )
        ),
    ],
)
def test_a_familys_adapter_is_judged_from_the_configuration_as_by_the_loaded_model(
    command: Command, tmp_path: Path, family: str, target: str
) -> None:
    base = save_family(tmp_path / "base", *FAMILIES[family])
    lora: dict[str, Any] = {
        "target_modules": [target],
        "fan_in_fan_out": "conv1d" in family,
    }
    folder = make_adapter(base, tmp_path / "adapter", seed=1, **lora)
    layout = load_base_model(EngineConfig(model=str(base), dtype="float32")).layout
    accepted = judge_offline(command, folder, base)
    assert accepted["accepted"] is True
    assert accepted == judge_loaded(folder, layout, tmp_path)

    tensors = load_file(folder / WEIGHTS_FILE)
    strange = {name.replace(target, "no_such_proj"): value for name, value in tensors.items()}
    save_file(strange, folder / WEIGHTS_FILE)
    refused = judge_offline(command, folder, base)
    assert refused["accepted"] is False
    assert refused == judge_loaded(folder, layout, tmp_path)


def judge_offline(command: Command, folder: Path, base: Path) -> dict[str, Any]:
    out = command("validate", str(folder), "--base", str(base), "--json")[1]
    return essence(json.loads(out))


def judge_loaded(folder: Path, layout: BaseLayout, directory: Path) -> dict[str, Any]:
    """What intake says against the layout of the loaded model."""
    config, weights, block = folder / CONFIG_FILE, folder / WEIGHTS_FILE, directory / "block"
    block.unlink(missing_ok=True)
    try:
        report = examine(config, weights, block, layout=layout, serving_dtype="float32")
    except AdapterRejected as exc:
        return {"accepted": False, "code": exc.reason, "param": exc.pointer}
    return {"accepted": True, "ranks": report.max_rank, "modules": report.num_modules}


def essence(answer: dict[str, Any]) -> dict[str, Any]:
    if not answer["accepted"]:
        return {key: answer[key] for key in ("accepted", "code", "param")}
    report = answer["report"]
    return {"accepted": True, "ranks": report["max_rank"], "modules": report["num_modules"]}


def test_offline_there_is_no_digest_to_be_had(
    command: Command, adapters: list[Path], tiny_base: Path
) -> None:
    report = command.ask("validate", str(adapters[0]), "--base", str(tiny_base))["report"]
    assert report["digest"] is None
    assert report["base_id"] is None


def test_people_read_what_to_change(
    command: Command, adapters: list[Path], tiny_base: Path, tmp_path: Path
) -> None:
    code, out, err = command("validate", str(adapters[0]), "--base", str(tiny_base))
    assert (code, out) == (ExitCode.OK, f"{adapters[0]} would be accepted\n")
    assert "rank 4-4 on 14 modules" in err

    folder = Path(shutil.copytree(adapters[0], tmp_path / "adapter"))
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({**config, "lora_alpha": 0}))
    code, out, err = command("validate", str(folder), "--base", str(tiny_base))
    assert (code, out) == (ExitCode.INVALID_ADAPTER, "")
    assert "invalid_alpha at /lora_alpha" in err
    assert "Set lora_alpha" in err


def test_what_is_no_base_is_a_mistake_on_the_command_line(
    command: Command, adapters: list[Path], tmp_path: Path
) -> None:
    for base in (tmp_path, tmp_path / "nothing", adapters[0]):
        code, _, err = command("validate", str(adapters[0]), "--base", str(base))
        assert code == ExitCode.USAGE
        assert "config.json" in err


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from loraplex.api.cli import main
sys.exit(main())
"""


def run_without_torch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "adapters", "validate", *arguments],
        capture_output=True,
        text=True,
        env=child_environment(**environment),
        check=False,
    )


def test_without_torch_the_server_is_asked_and_a_base_is_refused_with_the_way_out(
    caller: Caller, adapters: list[Path], tiny_base: Path
) -> None:
    where = {"LORAPLEX_URL": caller.url, "LORAPLEX_API_KEY": caller.key}
    asked = run_without_torch(str(adapters[0]), **where)
    assert asked.returncode == ExitCode.OK, asked.stderr
    offline = run_without_torch(str(adapters[0]), "--base", str(tiny_base))
    assert offline.returncode == ExitCode.FAILED
    assert "needs torch" in offline.stderr
    assert "loraplex[engine]" in offline.stderr
