"""`loraplex batch run` with a running server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.client.api_client import ApiClient
from loraplex.api.client.errors import ServerUnreachable
from support.batches import completions, jsonl, line
from support.command import Command
from support.server import Caller


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caller: Caller
) -> Command:
    return Command(monkeypatch, capsys, caller, "batch")


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """A file of three requests."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl(completions("tiny", ["a", "b", "c"])))
    return path


def ids(path: Path) -> list[str]:
    return [json.loads(each)["custom_id"] for each in path.read_text().splitlines()]


def test_a_run_ends_with_the_answers_beside_the_requests(
    command: Command, requests: Path, tmp_path: Path
) -> None:
    code, out, err = command("run", str(requests))
    assert (code, out) == (ExitCode.OK, "")
    assert "3 of 3 lines answered" in err
    assert ids(tmp_path / "in.out.jsonl") == ["line-0", "line-1", "line-2"]
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "in.out.jsonl"}


def test_the_batch_is_printed_as_json(command: Command, requests: Path, tmp_path: Path) -> None:
    batch = command.ask("run", str(requests), "-o", str(tmp_path / "out.jsonl"))
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert len(ids(tmp_path / "out.jsonl")) == 3


def test_failed_lines_are_in_a_file_of_their_own(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    bad = line("bad", {"model": "no-such", "prompt": "x"})
    file.write_bytes(jsonl([*completions("tiny", ["a"]), bad]))
    code, _, err = command("run", str(file))
    assert code == ExitCode.FAILED
    assert "1 lines failed" in err
    assert ids(tmp_path / "in.out.jsonl") == ["line-0"]
    assert ids(tmp_path / "in.out.errors.jsonl") == ["bad"]


def test_an_invalid_file_is_told_with_its_first_wrong_line(
    command: Command, tmp_path: Path
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(jsonl([*completions("tiny", ["a"]), *completions("tiny", ["b"])]))
    code, _, err = command("run", str(file))
    assert code == ExitCode.USAGE
    assert "line 2: custom_id: 'line-0' is not unique" in err
    file.write_text("no request")
    assert command("run", str(file), "-o", str(tmp_path / "other.jsonl"))[0] == ExitCode.USAGE


def test_an_output_is_not_overwritten_unasked(
    command: Command, requests: Path, tmp_path: Path
) -> None:
    (tmp_path / "in.out.jsonl").write_text("mine")
    code, _, err = command("run", str(requests))
    assert (code, "--force" in err) == (ExitCode.CONFLICT, True)
    assert (tmp_path / "in.out.jsonl").read_text() == "mine"
    assert command("run", str(requests), "--force")[0] == ExitCode.OK


@pytest.mark.parametrize("lost", ["post_file", "post", "get", "download"])
def test_an_interrupted_run_goes_on_with_the_same_batch(
    command: Command, requests: Path, caller: Caller, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    true = getattr(ApiClient, lost)

    def interrupted(self: ApiClient, *args: Any, **kwargs: Any) -> Any:
        true(self, *args, **kwargs)  # it arrives, and its answer does not
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ApiClient, lost, interrupted)
        assert command("run", str(requests))[0] == ExitCode.INTERRUPTED
    assert command("run", str(requests))[0] == ExitCode.OK
    assert len(list(caller.openai.batches.list())) == 1


def test_a_server_that_is_away_is_waited_for(
    command: Command, requests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, failures = ApiClient.get, [ServerUnreachable("it restarts")]

    def get(self: ApiClient, path: str, **query: Any) -> Any:
        if failures:
            raise failures.pop()
        return true(self, path, **query)

    monkeypatch.setattr(ApiClient, "get", get)
    code, _, err = command("run", str(requests))
    assert (code, "it restarts" in err) == (ExitCode.OK, True)


def test_an_unfinished_run_of_another_file_is_not_taken_for_this_one(
    command: Command, requests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ApiClient, "post", interrupted)
        command("run", str(requests))
    requests.write_bytes(jsonl(completions("tiny", ["other"])))
    code, _, err = command("run", str(requests))
    assert (code, "another file" in err) == (ExitCode.CONFLICT, True)
