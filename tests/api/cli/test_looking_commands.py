"""`loraplex requests`, `chat`, `top`, `doctor` and `fleet` with a running server."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loraplex.api.cli import doctor, main
from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.cli.fleet import row_of, state_of
from loraplex.api.cli.top import draw
from loraplex.engine.tuning.trainer_probe import TrainerReport
from loraplex.kernels.cpu_library import cpu_library
from support.cpu_kernels import needs_cpu_library, remove_cpu_library
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command as whoever has this key: exit code, stdout, stderr."""

    def run(url: str, key: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("LORAPLEX_URL", url)
        monkeypatch.setenv("LORAPLEX_API_KEY", key)
        monkeypatch.setattr("sys.argv", ["loraplex", *arguments])
        try:
            code = main()
        except SystemExit as exc:
            code = int(exc.code or 0)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def ask(run: Run, caller: Caller, *arguments: str) -> Any:
    code, out, err = run(caller.url, caller.key, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_a_conversation_is_held_and_found_in_the_log(
    run: Run, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    code, out, err = run(caller.url, caller.key, "chat", "tiny", "--max-tokens", "3", "--seed", "1")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) >= 2
    listed = ask(run, caller, "requests", "list")
    assert [entry["route"] for entry in listed] == ["/v1/chat/completions"] * 2
    assert listed[0]["prompt_tokens"] > listed[1]["prompt_tokens"], "what was said is sent along"
    code, out, _ = run(caller.url, caller.key, "requests", "show", listed[0]["id"])
    assert code == 0
    assert "Most of its time" in out


def test_a_question_is_answered_as_it_streams(run: Run, caller: Caller) -> None:
    code, out, err = run(caller.url, caller.key, "chat", "tiny", "Hello", "--max-tokens", "4")
    assert (code, err) == (0, "")
    assert out.endswith("\n")


def test_a_refused_chat_says_why_with_its_exit_code(run: Run, caller: Caller) -> None:
    code, out, err = run(caller.url, caller.key, "chat", "nobody", "Hello")
    assert (code, out) == (4, "")
    assert "model_not_found" in err
    (refused,) = ask(run, caller, "requests", "list", "--code", "model_not_found")
    assert refused["status"] == 404


def test_a_request_that_does_not_run_cannot_be_ended(run: Run, caller: Caller) -> None:
    code, _, err = run(caller.url, caller.key, "requests", "cancel", "req-0")
    assert code == 4
    assert "request_not_found" in err


def test_top_shows_a_tenant_its_own_and_an_operator_the_memory_too(
    run: Run, server: ServerUnderTest, resident: Caller
) -> None:
    resident.openai.completions.create(model="bot", prompt="x", max_tokens=1)
    own = ask(run, resident, "top")
    assert (own["residency"], own["objectives"]) == (None, []), "nobody set a target"
    operator = server.make_operator("watcher")

    def look() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        code, out, err = run(server.url, operator, "top", "--json")
        assert code == 0, err
        residency = json.loads(out)["residency"]
        return residency, [entry for entry in residency["data"] if entry["tenant"] == "resident"]

    wait_for(lambda: look()[1])  # the engine's figures are up to half a second old
    residency, mine = look()
    assert [entry["versions"] for entry in mine] == [["bot@1"]]
    assert {tier["tier"] for tier in residency["tiers"]} == {"device", "host", "disk"}
    held = {tier["tier"]: tier["num_bytes"] for tier in residency["tiers"]}
    assert held["device"] == sum(entry["device_bytes"] for entry in residency["data"])
    border, device = residency["border"], residency["prefixes"][0]
    capacities = {tier["tier"]: tier["capacity_bytes"] for tier in residency["tiers"]}
    assert border["arena_bytes"] == capacities["device"]
    assert (device["tier"], device["capacity_bytes"]) == ("device", border["kv_cache_bytes"])
    assert residency["replicas"] == [], "the server has an engine of its own"


def test_top_draws_the_tiers_of_prefixes_the_border_and_the_replicas() -> None:
    tier = {"tier": "disk", "used_bytes": 3 << 20, "capacity_bytes": 5 << 20, "hit_tokens": 70}
    copied = {"copied_in_bytes": 7 << 20, "copied_out_bytes": 9 << 20, "evicted_blocks": 11}
    connection = {
        **{
            "state": "ready",
            "role": "prefill",
            "failure": None,
            "num_running": 13,
            "max_batch": 32,
        },
        **{"kv_usage": 0.25, "device": "cuda:0"},
        "handovers": {"complete_per_second": 1.5, "bytes_per_second": 201e6},
    }
    lost = {**connection, "failure": {"code": "replica_lost"}}
    residency = {
        **{"data": [], "tiers": [], "ranks": [], "num_running": 1, "num_waiting": 0},
        **{"device_busy": 0.5, "kv_usage": 0.5, "pinned_bytes": 0},
        "prefixes": [{**tier, **copied}],
        "border": {"kv_cache_bytes": 80 << 20, "arena_bytes": 20 << 20, "moves": 3},
        "replicas": [
            {"address": "gpu-1:7070", "connection": connection},
            {"address": "gpu-2:7070", "connection": lost},
        ],
    }
    screen = Console(file=io.StringIO(), width=200)
    objective = {"met": 7, "ttft": 1, "itl": 0, "refused": 0, "failed": 0, "attained_share": 0.875}
    seen = {
        "requests": {"data": []},
        "objectives": [{"set_by": "tenant", **objective}],
        "goodput_per_second": 1.25,
        "residency": residency,
    }
    screen.print(draw(seen, 20))
    assert isinstance(screen.file, io.StringIO)
    shown = [
        re.sub(" +", " ", re.sub("[^ -~]", " ", line))
        for line in screen.file.getvalue().splitlines()
    ]
    text = "\n".join(shown)
    assert "goodput 1.25 per second" in text
    assert " tenant 88% 7 1 0 0 0 " in text
    assert "KV cache 80 MiB, arena 20 MiB, border moved 3 times" in text
    assert " disk 3.0 MiB 5.0 MiB 70 7.0 MiB 9.0 MiB 11 " in text
    assert " gpu-1:7070 prefill ready 13/32 - - - 25% 1.50/s, 201 MB/s " in text
    assert " gpu-2:7070 - replica_lost - - - - - - " in text


def test_doctor_finds_a_sound_installation_sound(
    run: Run, server: ServerUnderTest, caller: Caller
) -> None:
    where = ("--data-dir", str(server.settings.data_dir))
    found = ask(run, caller, "doctor", *where, "--database", server.settings.database_url)
    states = {finding["check"]: finding["state"] for finding in found}
    confinement = {check for check in states if check.startswith("confinement: ")}
    assert {
        "confinement: namespaces",
        "confinement: landlock",
        "confinement: limits",
    } <= confinement
    assert states["CPU kernels"] == ("ok" if cpu_library().functions else "warning")
    assert states["trainer"] == "skipped", "the server of the command's settings trains nothing"
    others = states.keys() - confinement - {"CPU kernels", "trainer"}
    assert {states[check] for check in others} == {"ok"}
    assert {"python", "torch", "data folder", "database", "store", "server", "key"} <= set(states)


@needs_cpu_library
def test_doctor_tells_an_operator_which_layers_of_the_base_run_fused(
    run: Run, server: ServerUnderTest
) -> None:
    operator = server.make_operator("engineer")
    _, out, _ = run(server.url, operator, "doctor", "--json")
    (found,) = (each for each in json.loads(out) if each["check"] == "fused layers")
    assert "RMS norms" in found["what"]
    assert found["what"].startswith("5 of 5 "), found


def test_doctor_says_what_computes_without_a_compiler(
    run: Run, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_cpu_library(monkeypatch)
    _, out, _ = run(caller.url, caller.key, "doctor", "--json")
    (found,) = (each for each in json.loads(out) if each["check"] == "CPU kernels")
    assert found["state"] == "warning"
    assert "PyTorch's operations" in found["what"]


@pytest.mark.slow
def test_doctor_checks_what_trainers_need(run: Run, caller: Caller) -> None:
    _, out, _ = run(caller.url, caller.key, "doctor", "--tuning", "--json")
    found = {each["check"]: each for each in json.loads(out)}
    assert found["trainer"]["state"] == "ok"
    for package in ("torch", "peft", "accelerate"):
        assert f"{package} {version(package)}" in found["trainer"]["what"]
    lacks = [each for each in ("namespaces", "landlock") if not is_confined(found, each)]
    assert found["trainer confinement"]["state"] == ("warning" if lacks else "ok")
    assert found["trainer memory"]["state"] == "ok"
    assert "loraplex plan --tuning" in found["trainer memory"]["what"]


def is_confined(found: dict[str, Any], mechanism: str) -> bool:
    """As the probe of examinations found."""
    state: str = found[f"confinement: {mechanism}"]["state"]
    return state == "ok"


def test_doctor_says_what_trainers_lack(
    run: Run, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = TrainerReport({"landlock": "no kernel support"}, ["read_file"], {}, "no CUDA device 3")
    monkeypatch.setattr(doctor, "probe_trainer", lambda device: report)
    code, out, _ = run(
        caller.url, caller.key, "doctor", "--tuning", "--tuning-device", "cuda:3", "--json"
    )
    found = {each["check"]: each for each in json.loads(out)}
    assert code == ExitCode.FAILED
    assert (found["trainer"]["state"], found["trainer"]["what"]) == ("failed", "no CUDA device 3")
    assert "landlock (no kernel support)" in found["trainer confinement"]["what"]
    monkeypatch.setattr(doctor, "missing_packages", lambda: ["peft"])
    _, out, _ = run(caller.url, caller.key, "doctor", "--tuning", "--json")
    found = {each["check"]: each for each in json.loads(out)}
    assert "pip install 'loraplex[engine,tune]'" in found["trainer"]["what"]
    assert "trainer confinement" not in found


def test_doctor_names_what_is_wrong_and_goes_on(run: Run, caller: Caller, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    broken = ("--data-dir", str(tmp_path), "--store", "ftp://nowhere")
    code, out, _ = run(caller.url, "lpx_live_nothing", "doctor", *broken, "--json")
    found = {finding["check"]: finding for finding in json.loads(out)}
    assert code == 1
    wrong = {check for check, finding in found.items() if finding["state"] == "failed"}
    assert wrong == {"data folder", "database", "store", "key"}
    assert "chmod 700" in found["data folder"]["what"]
    assert "db upgrade" in found["database"]["what"]


def test_replicas_are_added_drained_resumed_and_removed(run: Run, server: ServerUnderTest) -> None:
    key, address = server.make_operator("root-of-replicas"), "gpu-of-commands.example:7070"

    def fleet(*words: str) -> tuple[int, str, str]:
        return run(server.url, key, "fleet", *words)

    added = json.loads(fleet("add", address, "--json")[1])
    assert json.loads(fleet("status", "--json")[1]) == [added]
    for name, deed, wish in ((address, "drain", "draining"), (added["id"], "resume", "serving")):
        code, out, _ = fleet(deed, name)
        assert code == 0
        header, row = (line.split() for line in out.splitlines())
        assert dict(zip(header, row, strict=False))["wish"] == wish
    assert fleet("remove", address)[0] == 0
    code, _, err = fleet("drain", address)
    assert (code, address in err) == (ExitCode.NOT_FOUND, True)
    assert fleet("add", "no-port")[0] == ExitCode.USAGE


@pytest.mark.parametrize(
    ("state", "is_live", "connection", "shown"),
    [
        ("ready", True, None, "ready"),
        ("ready", False, None, "unseen"),
        ("ready", True, {"state": "draining", "failure": None}, "draining"),
        ("ready", True, {"state": "refusing", "failure": {"code": "no_answer"}}, "no_answer"),
    ],
)
def test_a_replicas_state_is_what_the_answering_server_sees(
    state: str, is_live: bool, connection: dict[str, Any] | None, shown: str
) -> None:
    assert state_of({"state": state, "is_live": is_live, "connection": connection}) == shown


def test_figures_are_shown_while_the_answering_server_is_connected() -> None:
    counts = ("num_running", "num_waiting", "max_batch", "num_resident", "num_loading")
    figures = {name: number for number, name in enumerate((*counts, "num_restarts"), 1)}
    handovers = {"complete_per_second": 1.5, "bytes_per_second": 201e6}
    connection = {
        **{**figures, "state": "ready", "kv_usage": 0.25, "device": "cuda:0"},
        **{"role": "decode", "handovers": handovers},
    }
    row = {"address": "gpu-1:7070", "id": "one", "seen_at": None, "is_draining": False}
    reached = row_of({**row, "connection": {**connection, "failure": None}})
    shown = ("running", "waiting", "resident", "loading", "restarts", "kv", "device")
    assert [reached[name] for name in shown] == ["1/3", 2, 4, 5, 6, "25%", "cuda:0"]
    assert (reached["role"], reached["handovers"]) == ("decode", "1.50/s, 201 MB/s")
    lost = row_of({**row, "connection": {**connection, "failure": {"code": "replica_lost"}}})
    assert [lost[name] for name in shown] == [None] * len(shown)


def test_certificates_are_made_once_without_a_server(run: Run, tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    code, _, err = run(nowhere, "", "fleet", "certificates", str(tmp_path / "new"), "--days", "7")
    assert (code, "Valid until" in err) == (0, True)
    before = (tmp_path / "new" / "api.key").read_bytes()
    code, _, err = run(nowhere, "", "fleet", "certificates", str(tmp_path / "new"))
    assert (code, "api.key" in err) == (ExitCode.CONFLICT, True)
    assert (tmp_path / "new" / "api.key").read_bytes() == before
