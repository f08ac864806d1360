"""`loraplex adapters import`: the adapters of vLLM's `--lora-modules`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraplex.api.cli.exit_codes import CommandFailed, ExitCode
from loraplex.api.cli.lora_modules import LoraModule, parse_modules
from support.command import Command
from support.server import Caller


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caller: Caller
) -> Command:
    return Command(monkeypatch, capsys, caller)


PAIR = LoraModule("sql", "/adapters/sql", None)
OBJECT = LoraModule("code", "/adapters/code", "meta/base")
JSON_OBJECT = '{"name": "code", "path": "/adapters/code", "base_model_name": "meta/base"}'


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["sql=/adapters/sql", JSON_OBJECT], [PAIR, OBJECT]),
        ([f"[{JSON_OBJECT}]"], [OBJECT]),
        (["a=s3://b/x=y"], [LoraModule("a", "s3://b/x=y", None)]),
        (["a=acme/bot"], [LoraModule("a", "hf://acme/bot", None)]),
        (["a=./acme/bot"], [LoraModule("a", "./acme/bot", None)]),
        (["a=acme"], [LoraModule("a", "acme", None)]),
    ],
)  # fmt: skip
def test_both_of_vllms_forms_are_read(words: list[str], found: list[LoraModule]) -> None:
    assert parse_modules(words) == found


@pytest.mark.parametrize(
    "content",
    [
        f'["sql=/adapters/sql", {JSON_OBJECT}]',
        f"model: base\nlora-modules:\n- sql=/adapters/sql\n- '{JSON_OBJECT}'\n",
        "lora_modules:\n- sql=/adapters/sql\n- {name: code, path: /adapters/code, "
        "base_model_name: meta/base}\n",
    ],
    ids=["JSON", "vLLM's configuration", "YAML"],
)
def test_a_file_holds_a_list(tmp_path: Path, content: str) -> None:
    file = tmp_path / "modules"
    file.write_text(content)
    assert parse_modules([str(file)]) == [PAIR, OBJECT]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("sql", "neither a file nor NAME=PATH"),
        ("=path", "not NAME=PATH"),
        ("name=", "not NAME=PATH"),
        ("{", "not JSON"),
        ("[1]", "not NAME=PATH, nor an object"),
        ('{"name": "a"}', "no name or no path"),
        ('{"name": "a", "path": "b", "rank": "8"}', "unknown fields rank"),
        ('["a=x", "a=y"]', "'a' is there twice"),
    ],
)
def test_what_is_no_entry_is_named(word: str, message: str) -> None:
    with pytest.raises(CommandFailed, match=message) as failure:
        parse_modules([word])
    assert failure.value.exit_code is ExitCode.USAGE


def test_adapters_are_imported_and_one_failure_does_not_stop_the_others(
    command: Command, adapters: list[Path], tmp_path: Path
) -> None:
    entry = {"name": "code", "path": str(adapters[1]), "base_model_name": "other-base"}
    modules = tmp_path / "modules.json"
    modules.write_text(json.dumps([f"lost={tmp_path}", entry, f"Upper={adapters[2]}"]))
    code, out, err = command(
        "import",
        "--lora-modules",
        f"sql={adapters[0]}",
        str(modules),
        f"last={adapters[2]}",
        "--json",
    )
    rows = {row["name"]: row for row in json.loads(out)}
    assert (code, "2 of 5 adapters were not imported" in err) == (ExitCode.FAILED, True)
    assert [row["state"] for row in rows.values()] == [
        "ready", "failed", "ready", "failed", "ready",
    ]  # fmt: skip
    assert "no adapter_model.safetensors" in rows["lost"]["message"]
    assert "not an adapter name" in rows["Upper"]["message"]
    assert rows["code"]["message"] == "made for other-base; the server runs tiny"
    assert {adapter["name"] for adapter in command.ask("list")} == {"sql", "code", "last"}


def test_an_import_prints_a_table(command: Command, adapters: list[Path]) -> None:
    code, out, _ = command("import", f"bot={adapters[0]}")
    assert (code, out.split()) == (
        ExitCode.OK,
        ["name", "version", "state", "message", "bot", "1", "ready", "-"],
    )


def test_an_import_of_nothing_is_refused(command: Command) -> None:
    code, _, err = command("import")
    assert (code, "No adapters are given" in err) == (ExitCode.USAGE, True)
