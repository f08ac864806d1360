"""`loraplex samples` with a running server."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.evaluation.golden_set import GoldenSet
from loraplex.platform.adapters.models import AdapterVersion
from loraplex.platform.samples.service import NewSample
from support.command import Command
from support.samples import new_sample, write_samples
from support.server import Caller, ServerUnderTest


@pytest.fixture
def owner(caller: Caller, adapters: list[Path]) -> Caller:
    """A tenant with an adapter that is not sampled."""
    caller.push(adapters[0], "bot")
    return caller


def test_samples_are_turned_on_listed_shown_exported_and_deleted(
    owner: Caller,
    server: ServerUnderTest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    samples = Command(monkeypatch, capsys, owner, "samples")
    assert samples.ask("show", "bot")["enabled"] is False
    on = samples.ask("on", "bot", "--percent", "100", "--days", "3")
    assert (on["percent"], on["days"]) == (100.0, 3)
    write_samples(server, owner, lambda version: [_new(version, text) for text in ("A", "B", "C")])
    listed = samples.ask("list", "bot", "--version", "1")
    assert len(listed) == 3
    shown = samples.ask("show", "bot", listed[0]["id"])
    assert shown["answer"]["content"] in {"A", "B", "C"}
    file = tmp_path / "golden.jsonl"
    code, out, err = samples("export", "bot", "--format", "golden", "-o", str(file))
    assert code == ExitCode.OK
    assert out.startswith("file-")
    assert "bot-golden.jsonl has" in err
    assert {case.expected for case in GoldenSet.read(file).cases} == {"A", "B", "C"}
    assert samples("delete", "bot")[0] == ExitCode.USAGE, "nobody is there to confirm it"
    assert samples.ask("delete", "bot", listed[0]["id"], "--yes")["samples"] == 1
    assert samples("delete", "bot", "--yes")[1] == "deleted 2\n"
    off = samples.ask("off", "bot")
    assert (off["enabled"], off["samples"]) == (False, 0)
    code, _, err = samples("export", "bot")
    assert code == ExitCode.CONFLICT
    assert "no sample" in err


def _new(version: AdapterVersion, text: str) -> NewSample:
    return new_sample(version, text=text)
