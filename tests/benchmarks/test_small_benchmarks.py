"""Benchmarks beside those of the engine run at their smallest sizes; how fast is not asked.

Every benchmark is run by a test of this folder.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import uvloop
from benchmarks.peers import Ours, PeerFailed, find_tcmalloc

from benchmarks import (
    bench_admission,
    bench_api,
    bench_api_pairs,
    bench_border,
    bench_divided_ends,
    bench_fleet,
    bench_loading,
    bench_peers,
    bench_restart,
    bench_scheduler,
    bench_shared_queues,
    bench_slo,
)
from loraplex.api.local.installation import TenantAccess
from loraplex.engine.process.client import EngineClient
from support import fake_vllm
from support.fake_client import FAKE_ENGINE
from support.figures import is_figure
from support.server import ServerUnderTest, serving

ROOT = Path(__file__).parents[2]


@pytest.fixture
def garbage_collection() -> Iterator[None]:
    """As it was before, whatever the test does to it."""
    yield
    gc.unfreeze()
    gc.enable()


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON that was printed last."""
    report: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return report


def makefile_benchmarks() -> list[str]:
    """The names of the targets `bench-NAME`."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    listed = re.search(r"^BENCHMARKS := (.*)$", makefile, re.MULTILINE)
    assert listed is not None
    names = listed[1].split()
    assert sorted(re.findall(r"^bench-([a-z-]+): ## ", makefile, re.MULTILINE)) == sorted(names)
    return names


def test_every_benchmark_is_run_by_a_test() -> None:
    modules = {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert {f"bench_{name.replace('-', '_')}" for name in makefile_benchmarks()} == modules
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    assert [name for name in modules if not any(f" {name}" in text for text in texts)] == []


def test_the_link_between_machines_is_timed_at_both_ends(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_fleet, "LOOPS", {"uvloop": uvloop.new_event_loop})
    written = tmp_path / "fleet.json"
    arguments = ["--streams", "4", "--steps", "30", "--json", str(written)]
    assert bench_fleet.main(arguments) in (0, 1)
    report = last_line(capsys)
    assert [(row["loop"], row["steps"]) for row in report["rows"]] == [
        ("uvloop", pace) for pace in bench_fleet.PACES
    ]
    assert all(is_figure(row["api_us"]) for row in report["rows"])
    assert json.loads(written.read_text())["rows"] == report["rows"]
    barred = [row for row in report["rows"] if (row["loop"], row["steps"]) == bench_fleet.BARRED]
    assert [row["us_per_token"] for row in barred] == [report["us_per_token"]]


def test_goodput_under_overload_is_measured_with_and_without_a_target(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert bench_slo.main(["--smoke", "--models", str(tmp_path)]) == 0
    report = last_line(capsys)
    of_all, of_classes = report["rows"][:4], report["rows"][4:]
    plain, bound, plain_flood, bound_flood = of_all
    assert bound["goodput, requests/s"] > plain["goodput, requests/s"]
    assert bound_flood["goodput, requests/s"] > plain_flood["goodput, requests/s"]
    assert [row["refused"] > 0 for row in of_all] == [False, True, False, True]
    assert bound_flood["quiet refused"] == 0
    ratio = report["goodput_over_capacity_with_target"]
    capacity = report["capacity_requests_per_second"]
    assert ratio == pytest.approx(bound["goodput, requests/s"] / capacity)
    for arrivals in ("classes", "tenant classes"):
        goodput = {
            row["target"]: row["goodput, requests/s"]
            for row in of_classes
            if row["arrivals"] == arrivals
        }
        assert goodput["class"] > max(goodput["none"], goodput["TTFT"])


def test_the_moving_border_is_compared_with_every_fixed_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_border, "PARTS", (1 / 8, 3 / 4))
    assert bench_border.main(["--seconds", "8", "--turn", "2"]) in (0, 1)
    of_memories = last_line(capsys)["rows"]
    assert list(of_memories) == ["device", "host"]
    for rows in of_memories.values():
        assert list(rows) == list(bench_border.TRAFFICS)
        for row in rows.values():
            assert row["best_fixed_ms"] == min(row["fixed_ms"].values())
            assert row["ratio"] == pytest.approx(row["moving_ms"] / row["best_fixed_ms"], rel=0.01)
    many = of_memories["device"]["many adapters"]
    assert many["fixed_ms"]["0.75"] < many["fixed_ms"]["0.125"]
    assert many["moves"] > 0


@pytest.mark.usefixtures("garbage_collection")
def test_the_scheduler_is_timed_with_ample_and_with_scarce_blocks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_scheduler, "RUNNING", (64, 256))
    long_contexts = (bench_scheduler.LongContexts(8, 512, 2, 1.0),)
    monkeypatch.setattr(bench_scheduler, "LONG_CONTEXTS", long_contexts)
    monkeypatch.setattr(bench_scheduler, "NUM_ADAPTERS", 150)
    assert bench_scheduler.main(["--steps", "3"]) in (0, 1)
    report = last_line(capsys)
    batches = [(row["running"], row["blocks"]) for row in report["rows"]]
    assert batches == [(64, "ample"), (64, "scarce"), (256, "ample"), (256, "scarce")]
    assert all(is_figure(row["p99_us"]) for row in report["rows"])
    assert report["p99_us_at_256"] in [row["p99_us"] for row in report["rows"]]
    assert is_figure(report["statistics"]["changes_p50_us"])
    (row,) = report["long_contexts"]
    parts = ("schedule", "eager_inputs", "graph_inputs", "bookkeeping")
    assert all(is_figure(row[f"{part}_p50_us"]) for part in parts)
    assert row["step_us"] == row["schedule_p50_us"] + row["bookkeeping_p50_us"] + max(
        row["eager_inputs_p50_us"], row["graph_inputs_p50_us"]
    )


def test_restarts_are_timed_beside_what_they_cannot_avoid(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The imports and the load are the engine's own; what restarts is the fake one."""
    client = partial(EngineClient, command=FAKE_ENGINE)
    monkeypatch.setattr(bench_restart, "EngineClient", client)
    assert bench_restart.main(["--trials", "1"]) in (0, 1)
    report = last_line(capsys)
    assert is_figure(report["imports_seconds"])
    assert is_figure(report["model_load_seconds"])
    assert is_figure(report["ready_again_seconds"])


def test_loads_are_measured_in_a_process_of_their_own_and_so_is_the_engine(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_loading, "EngineClient", partial(EngineClient, command=FAKE_ENGINE))
    arguments = ("--shape", "smoke", "--quantization", "int4", "--dtype", "float32")
    written = str(tmp_path / "loading-smoke")
    bench_loading.main([*arguments, "--models", str(tmp_path), "--bases", written])
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    in_int4, as_it_is = report["rows"]
    assert is_figure(in_int4["weights_gib"])
    assert is_figure(in_int4["seconds"])
    assert as_it_is["weights_gib"] > in_int4["weights_gib"]
    assert is_figure(report["engine"][0]["resident_gib"])


def test_whole_and_divided_ends_are_measured_on_two_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bench_divided_ends.main(["--smoke", "--models", str(tmp_path)])
    whole, divided = json.loads(capfd.readouterr().out.splitlines()[-1])["rows"]
    assert (whole["ends"], divided["ends"]) == ("whole", "divided")
    assert is_figure(divided["load peak MB"])
    assert is_figure(divided["ms, batch 4"])
    assert 0 < divided["weights MB"] < whole["weights MB"]


def test_the_api_is_timed_by_request_and_by_token(capsys: pytest.CaptureFixture[str]) -> None:
    bench_api.main(["--requests", "16", "--streams", "4"])
    report = last_line(capsys)
    assert is_figure(report["request_seconds"])
    assert is_figure(report["tokens_per_event"])
    assert report["streams_bytes"] >= report["idle_bytes"] > 0


def test_the_api_is_timed_against_that_of_another_tree(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench_api_pairs.main(["--before", str(ROOT), "--rounds", "2", "--requests", "8"])
    report = last_line(capsys)
    for ratios in (report["request"], report["stream"]):
        assert ratios["mean"] > -1
        assert is_figure(ratios["standard_error"])


def test_a_quiet_tenant_is_timed_alone_and_beside_a_loud_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_shared_queues.main(["--smoke", "--models", str(tmp_path)]) == 0
    report = last_line(capsys)
    assert [row["what"] for row in report["rows"]] == list(bench_shared_queues.MEASURES)
    assert all(is_figure(row["ratio"]) for row in report["rows"])
    assert report["loud"]["answered"] > 0


def test_admission_is_timed_with_and_without_limits(capsys: pytest.CaptureFixture[str]) -> None:
    bench_admission.main(["--rounds", "2"])
    printed = capsys.readouterr().out
    assert "ledger row alone, no limits" in printed
    assert "admission, all limits" in printed


def make_fake_vllm(folder: Path) -> list[str]:
    """The options that have `bench_peers` start `support.fake_vllm` as it starts vLLM."""
    python, openmp = folder / "bin" / "python", folder / "lib" / "libiomp5.so"
    for path in (python, openmp):
        path.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -S {fake_vllm.__file__} "$@"\n')
    python.chmod(0o755)
    openmp.touch()
    return ["--vllm-python", str(python), "--tcmalloc", str(openmp)]


def fork_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our server, and what pushes adapters to it, without importing everything anew."""
    servers: list[ServerUnderTest] = []

    @contextmanager
    def forked(options: Sequence[str], **_: object) -> Iterator[ServerUnderTest]:
        model, data_dir = (options[options.index(name) + 1] for name in ("--model", "--data-dir"))
        with serving(Path(model), Path(data_dir), *options) as server:
            servers.append(server)
            yield server

    def push(ours: Ours, url: str) -> tuple[TenantAccess, list[str]]:
        caller = servers[-1].make_caller("bench")
        names = [caller.push(path, path.name)["id"] for path in ours.setup.adapters]
        return TenantAccess("bench", caller.key), names

    monkeypatch.setattr("benchmarks.peers.running_server", forked)
    monkeypatch.setattr(Ours, "_push", push)


def test_peers_are_measured_in_turn_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ours(monkeypatch)
    monkeypatch.setattr(bench_peers, "leave_on_sigterm", lambda: None)
    report = tmp_path / "report.json"
    sizes = ["--requests", "2", "--concurrency", "2", "--singles", "1", "--adapters", "2"]
    lengths = ["--prompt-tokens", "6", "--output-tokens", "3", "--repeats", "1"]
    arguments = ["--shape", "smoke", *sizes, *lengths, *make_fake_vllm(tmp_path / "vllm")]
    files = ["--models", str(tmp_path), "--json", str(report)]
    more = ["--without", "ours_plain", "--burn", "--serve-options", "--memory-gib 2"]
    assert bench_peers.main([*arguments, *files, *more]) == 0

    found = json.loads(report.read_text())
    assert found["dtype"] in ("float32", "bfloat16")
    figures = [*bench_peers.WORKLOADS, *bench_peers.LATENCIES]
    for peer in ("ours", "vllm", "peft"):
        assert list(found["runs"][peer]) == figures
        assert all(is_figure(value) for value in found["runs"][peer].values())
    assert list(found["runs"]["vllm_base"]) == ["base", "single"]
    ratio = found["runs"]["ours"]["mixed"] / found["runs"]["vllm"]["mixed"]
    assert found["ratios"]["ours/vllm"]["mixed"] == pytest.approx(ratio)
    assert "ours/peft" in capsys.readouterr().out
    log = report.with_suffix(".vllm.log").read_text()
    # A log is committed: it does not name this machine's folders.
    assert gettempdir() not in log
    folders = [f"adapter-{index}={path}" for index, path in enumerate(adapter_folders(Path()))]
    assert f"--max-loras 2 --max-cpu-loras 2 --lora-modules {' '.join(folders)} KV 1" in log
    assert "--enable-lora" not in report.with_suffix(".vllm_base.log").read_text()


def adapter_folders(models: Path) -> list[Path]:
    return [models / "peers-smoke" / f"adapter-r16-{index}" for index in range(2)]


def test_a_peer_that_is_not_installed_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_peers, "leave_on_sigterm", lambda: None)
    arguments = ["--shape", "smoke", "--models", str(tmp_path)]
    assert bench_peers.main([*arguments, "--vllm-python", str(tmp_path / "python")]) == 1
    assert "make bench-peers creates it" in capsys.readouterr().err
    monkeypatch.setattr("benchmarks.peers.TCMALLOC", "none.so")
    with pytest.raises(PeerFailed, match="install Debian's libtcmalloc-minimal4"):
        find_tcmalloc()
