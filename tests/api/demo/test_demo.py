"""`loraplex demo` as a new user runs it; however it ends, nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import pytest

from loraplex.api.demo.task import ADAPTER_STYLES, Style, held_out_requests

pytestmark = pytest.mark.slow


class DemoRun(NamedTuple):
    """How `loraplex demo --once` ended, and what it wrote."""

    process: subprocess.CompletedProcess[str]
    results: Any
    temporary: Path


def demo_command(*options: str) -> list[str]:
    return [sys.executable, "-m", "loraplex", "demo", *options]


def environment(temporary: Path) -> dict[str, str]:
    """Ours, with all temporary files in one folder."""
    python_path = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": python_path}


def processes_of(folder: Path) -> Iterator[int]:
    """Running processes that were started with a path in `folder`."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (entry / "cmdline").read_bytes():
                yield int(entry.name)
        except OSError:  # it ended meanwhile
            continue


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    return run_demo(tmp_path_factory.mktemp("demo"))


def run_demo(folder: Path, *options: str) -> DemoRun:
    temporary = folder / "temporary"
    temporary.mkdir()
    process = subprocess.run(
        demo_command("--once", "--json", str(folder / "results.json"), *options),
        env=environment(temporary),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return DemoRun(process, json.loads((folder / "results.json").read_text()), temporary)


def test_every_adapter_answers_in_its_style_and_the_base_in_none(run: DemoRun) -> None:
    assert run.results["quantization"] == "int8"
    found = {(part["tenant"], part["name"]) for part in run.results["adapters"]}
    assert found == {("acme", "sql"), ("acme", "json"), ("globex", "pirate")}
    for part in run.results["adapters"]:
        assert part["accuracy"] >= 0.9
        assert part["base_accuracy"] < 0.1


@pytest.mark.slow(is_sampled=False)
def test_two_ranks_answer_as_the_adapters_were_trained_to(tmp_path: Path) -> None:
    run = run_demo(tmp_path, "--tensor-parallel-size", "2")
    assert run.results["quantization"] == "int8"
    for part in run.results["adapters"]:
        assert part["accuracy"] >= 0.9
        assert part["base_accuracy"] < 0.1
    assert list(run.temporary.iterdir()) == []
    assert list(processes_of(run.temporary)) == []


@pytest.mark.parametrize("style", ADAPTER_STYLES)
def test_samples_are_checked_against_the_task_itself(run: DemoRun, style: Style) -> None:
    samples = [sample for sample in run.results["samples"] if sample["adapter"] == style]
    requests = held_out_requests(len(samples))
    assert len(samples) >= 50
    assert [s["prompt"] for s in samples] == [r.prompt for r in requests]
    assert [s["expected"] for s in samples] == [r.answer(style) for r in requests]
    [part] = [part for part in run.results["adapters"] if part["name"] == style]
    right = sum(sample["answer"] == sample["expected"] for sample in samples)
    assert part["accuracy"] == pytest.approx(right / len(samples))
    assert {sample["version"] for sample in samples} == {f"{part['tenant']}/{style}@1"}


def test_the_commands_and_the_accuracies_are_shown(run: DemoRun) -> None:
    assert "loraplex adapters push" in run.process.stderr
    assert "output tokens/s" in run.process.stdout
    assert "lpx_live_" not in run.process.stderr


def test_nothing_is_left_behind(run: DemoRun) -> None:
    assert list(run.temporary.iterdir()) == []
    assert list(processes_of(run.temporary)) == []


def test_terminated_while_it_starts_it_takes_its_server_with_it(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        demo_command("--once"),
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = monotonic() + 60
    while not list(processes_of(tmp_path)):
        assert demo.poll() is None
        assert monotonic() < deadline
        sleep(0.05)
    demo.send_signal(signal.SIGTERM)
    assert demo.wait(60) == 128 + signal.SIGTERM
    assert list(processes_of(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["api.cli.demo", "api.cli.bench", "api.demo.recipe"])
def test_commands_are_there_without_torch(module: str, tmp_path: Path) -> None:
    script = f"import sys, loraplex.{module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], env=environment(tmp_path), check=True)
