"""`loraplex export` with a running server: everything is there, and as the API has it."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from loraplex.api.cli import main
from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.client.tenant_export import SUMMARY_FILE, TenantExport, _file_name
from loraplex.api.local.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from loraplex.platform.keys.principal import Scope
from support.batches import completions, create, ended, jsonl
from support.command import Command
from support.evaluations import ended as ended_evaluation
from support.evaluations import put_set, start
from support.server import Caller, ServerUnderTest
from support.tuning_jobs import create as create_job
from support.tuning_jobs import ended as ended_job
from support.tuning_jobs import examples


@pytest.fixture(scope="module")
def exported(server: ServerUnderTest, adapters: list[Path]) -> Caller:
    """A tenant with two versions of an adapter, a user, a budget, and a batch, a job and an
    evaluation that have ended: nothing changes any more."""
    caller = server.make_caller("export-owner")
    for folder in adapters[:2]:
        caller.push(folder, "bot")
    caller.http.post("/v1/users", json={"email": "x@export.example", "role": "viewer"})
    (key,) = caller.http.get("/v1/keys").json()["data"]
    caller.http.put(f"/v1/keys/{key['id']}/budgets/day", json={"amount": "5"})
    stored = caller.openai.responses.create(
        model="bot", input="What is new?", max_output_tokens=16, store=True
    )
    caller.openai.responses.create(
        model="bot",
        input="And then?",
        previous_response_id=stored.id,
        max_output_tokens=16,
        store=True,
    )
    batch = create(caller.openai, jsonl(completions("bot", ["a", "b"])))
    assert ended(caller.openai, batch.id).status == "completed"
    job = create_job(caller.openai, examples("wrong"))
    assert ended_job(caller.openai, job.id).status == "failed"
    put_set(caller, [{"id": "a", "prompt": "x", "expected": "y"}])
    ended_evaluation(caller, start(caller, 2)["id"])
    return caller


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], exported: Caller
) -> Command:
    return Command(monkeypatch, capsys, exported, "export")


def lines(folder: Path, name: str) -> list[Any]:
    return [json.loads(each) for each in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_an_export_has_everything_as_the_api_has_it(
    command: Command, exported: Caller, adapters: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    counts = command.ask(str(folder))
    for name in ("users", "budgets", "usage", "files", "batches"):
        assert lines(folder, name) == exported.http.get(f"/v1/{name}").json()["data"]
    (job,) = lines(folder, "jobs")
    assert job == exported.http.get(f"/v1/fine_tuning/jobs/{job['id']}").json()
    sets = exported.http.get("/v1/adapters/bot/golden-sets").json()["data"]
    assert lines(folder, "golden_sets") == sets
    (evaluation,) = lines(folder, "evaluations")
    path = f"/v1/adapters/bot/evaluations/{evaluation['id']}"
    assert evaluation == exported.http.get(path).json()
    (key,) = lines(folder, "keys")
    assert exported.key not in json.dumps(key), "keys have no secrets"
    assert {entry["action"] for entry in lines(folder, "audit")} >= {"user.create", "budget.set"}
    for number, source in enumerate(adapters[:2], 1):
        copied = folder / "adapters" / "bot" / str(number)
        for file in (WEIGHTS_FILE, CONFIG_FILE):
            path = f"/v1/adapters/bot/versions/{number}/files/{file}"
            assert (copied / file).read_bytes() == exported.http.get(path).content
        assert (copied / WEIGHTS_FILE).read_bytes() == (source / WEIGHTS_FILE).read_bytes()
    for file in lines(folder, "files"):
        content = exported.openai.files.content(file["id"]).content
        assert (folder / "files" / file["id"]).read_bytes() == content
    responses = {each["id"]: each for each in lines(folder, "responses")}
    assert len(responses) == counts["responses"] == 2
    for stored_id, each in responses.items():
        assert each["response"] == exported.http.get(f"/v1/responses/{stored_id}").json()
        assert len(each["input"]) == 1, "of this request itself"
    assert {each["previous_response_id"] for each in responses.values()} < {None, *responses}
    summary = json.loads((folder / SUMMARY_FILE).read_text())
    assert summary["tenant"]["slug"] == "export-owner"
    assert summary["counts"] == counts
    assert counts["adapters"] == 2
    assert counts["files"] >= 4


def test_an_interrupted_export_continues_without_what_is_whole(
    command: Command,
    exported: Caller,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = TenantExport._files

    def interrupted(self: TenantExport) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(TenantExport, "_files", interrupted)
    assert command(str(tmp_path))[0] != ExitCode.OK
    assert not (tmp_path / SUMMARY_FILE).exists(), "it is not complete"
    weights = tmp_path / "adapters" / "bot" / "1" / WEIGHTS_FILE
    written_at = weights.stat().st_mtime_ns
    config = tmp_path / "adapters" / "bot" / "2" / CONFIG_FILE
    config.unlink()
    monkeypatch.setattr(TenantExport, "_files", real)
    code, _, err = command(str(tmp_path))
    assert code == ExitCode.OK
    assert "2 adapters" in err
    assert weights.stat().st_mtime_ns == written_at
    assert config.exists()
    assert (tmp_path / SUMMARY_FILE).exists()


def test_a_key_without_a_scope_is_refused_and_leaves_no_summary(
    server: ServerUnderTest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    narrow = server.make_caller("export-narrow", [Scope.INFER])
    code, _, err = Command(monkeypatch, capsys, narrow, "export")(str(tmp_path))
    assert code != ExitCode.OK
    assert "users:manage" in err
    assert not (tmp_path / SUMMARY_FILE).exists()


def test_names_from_the_server_cannot_leave_the_folder() -> None:
    assert _file_name("../x") == "%2E%2E%2Fx"
    assert _file_name("bot-1_a") == "bot-1_a"


def names_and_contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def unpacked(archive: tarfile.TarFile) -> dict[str, bytes]:
    members = [member for member in archive.getmembers() if member.isfile()]
    contents = {}
    for member in members:
        content = archive.extractfile(member)
        assert content is not None
        contents[member.name] = content.read()
    return contents


CHANGING = {"adapters.jsonl", "audit.jsonl", "requests.jsonl", "keys.jsonl", "usage.jsonl"}
"""What an export itself adds to, and figures that servers write later."""


def test_a_tar_has_the_files_of_the_folder_and_appears_when_it_is_complete(
    command: Command, tmp_path: Path
) -> None:
    command.ask(str(tmp_path / "folder"))
    target = tmp_path / "tars" / "acme.tar"
    target.parent.mkdir()
    assert command("--tar", str(target))[0] == 0
    assert list(target.parent.iterdir()) == [target]
    with tarfile.open(target) as archive:
        packed, plain = unpacked(archive), names_and_contents(tmp_path / "folder")
    assert packed.keys() == plain.keys()
    for name in packed.keys() - CHANGING - {SUMMARY_FILE}:
        assert packed[name] == plain[name], name


def test_a_tar_is_written_to_stdout(
    exported: Caller,
    capsysbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LORAPLEX_URL", exported.url)
    monkeypatch.setenv("LORAPLEX_API_KEY", exported.key)
    monkeypatch.setattr("sys.argv", ["loraplex", "export", "--tar", "-"])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    with tarfile.open(fileobj=io.BytesIO(capsysbinary.readouterr().out)) as archive:
        assert SUMMARY_FILE in unpacked(archive)


@pytest.mark.parametrize("arguments", [(), ("folder", "--tar", "x.tar"), ("--tar", "-", "--json")])
def test_a_folder_and_a_tar_exclude_each_other(
    command: Command, arguments: tuple[str, ...]
) -> None:
    assert command(*arguments)[0] == ExitCode.USAGE


def test_a_tar_in_a_missing_folder_is_refused(command: Command, tmp_path: Path) -> None:
    code, _, err = command("--tar", str(tmp_path / "none" / "acme.tar"))
    assert code != 0
    assert "No such file" in err
