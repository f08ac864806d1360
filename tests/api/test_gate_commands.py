"""`loraplex golden-sets`, `eval --golden-set` and `adapters gate` with a running server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.api.cli.exit_codes import ExitCode
from support.command import Command
from support.evaluations import expecting, put_set
from support.server import Caller

PROMPTS = ["one", "two two", "three"]


@pytest.fixture
def owner(caller: Caller, adapters: list[Path]) -> Caller:
    """A tenant with `bot@1`, the version of `prod`, and `bot@2`."""
    caller.push(adapters[0], "bot", aliases=["prod"])
    caller.push(adapters[1], "bot")
    return caller


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], owner: Caller
) -> Callable[..., Command]:
    return lambda group: Command(monkeypatch, capsys, owner, group)


@pytest.mark.slow
def test_a_golden_set_is_set_evaluated_and_removed(
    command: Callable[..., Command], owner: Caller, tmp_path: Path
) -> None:
    file = tmp_path / "golden.jsonl"
    file.write_text("".join(f"{json.dumps(case)}\n" for case in expecting(owner, "bot@1", PROMPTS)))
    sets = command("golden-sets")
    row = sets.ask("set", "bot", "golden", str(file), "--tolerance", "0.01")
    assert (row["num_cases"], row["tolerance"]) == (3, 0.01)
    assert [each["name"] for each in sets.ask("list", "bot")] == ["golden"]
    code, out, err = command("eval")("bot@2", "--golden-set", "golden")
    assert code == ExitCode.FAILED
    assert "bot@2 is worse than bot@1: all" in err
    header, every, *_ = out.splitlines()
    assert header.split()[2:5] == ["tiny", "bot@1", "bot@2"]
    assert every.endswith("yes")
    report = command("eval").ask("bot@1", "--golden-set", "golden", "--against", "bot@2")
    assert report["models"] == {"candidate": "bot@1", "against": "bot@2", "base": "tiny"}
    assert not report["is_regression"]
    assert sets("rm", "bot", "golden")[0] == ExitCode.OK
    assert sets.ask("list", "bot") == []


def test_a_set_and_a_file_exclude_each_other(
    command: Callable[..., Command], tmp_path: Path
) -> None:
    evaluate = command("eval")
    assert evaluate("bot@2")[0] == ExitCode.USAGE
    file = tmp_path / "golden.jsonl"
    file.write_text("")
    both = ("--set", str(file), "--golden-set", "golden")
    assert evaluate("bot@2", *both)[0] == ExitCode.USAGE
    assert evaluate("bot@2", "--golden-set", "golden", "--tolerance", "0")[0] == ExitCode.USAGE
    other = evaluate("bot@2", "--golden-set", "golden", "--against", "other@1")
    assert other[0] == ExitCode.USAGE


@pytest.mark.slow
def test_setting_a_gated_alias_waits_for_its_evaluation(
    command: Callable[..., Command], owner: Caller
) -> None:
    put_set(owner, expecting(owner, "bot@2", PROMPTS))
    adapters = command("adapters")
    assert adapters.ask("gate", "set", "bot", "prod", "golden")["golden_set"] == "golden"
    assert adapters.ask("gate", "show", "bot", "prod")["tolerance"] is None
    code, _, err = adapters("alias", "set", "bot", "prod", "2", "--no-wait")
    assert code == ExitCode.CONFLICT
    assert "gate_not_passed" in err
    assert adapters.ask("alias", "set", "bot", "prod", "2")["version"] == 2
    (change, *_) = adapters.ask("alias", "history", "bot", "prod")
    assert change["evaluation"] is not None
    code, _, err = adapters("alias", "set", "bot", "prod", "1")
    assert code == ExitCode.CONFLICT
    assert "gate_refused" in err
    assert adapters.ask("alias", "set", "bot", "prod", "1", "--override", "outage")["version"] == 1
    assert adapters("gate", "rm", "bot", "prod")[0] == ExitCode.OK
    assert adapters.ask("alias", "set", "bot", "prod", "2")["version"] == 2


@pytest.mark.slow
def test_a_push_to_a_gated_alias_says_how_to_move_it(
    command: Callable[..., Command], owner: Caller, adapters: list[Path]
) -> None:
    put_set(owner, [{"id": "a", "prompt": "x", "expected": "y"}])
    on_adapters = command("adapters")
    on_adapters.ask("gate", "set", "bot", "prod", "golden")
    code, _, err = on_adapters("push", str(adapters[2]), "bot", "--alias", "prod")
    assert code == ExitCode.OK
    assert "loraplex adapters alias set bot prod 3" in err
    assert 'bot@3"' in err
    assert 'bot@prod"' not in err, "it has another version"
