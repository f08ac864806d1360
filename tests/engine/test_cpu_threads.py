"""The number of CPU threads follows the load of other processes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

import pytest
import torch

from loraplex.engine.execution import cpu_threads
from loraplex.engine.execution.cpu_threads import CpuThreads, open_cpu_threads
from support.engine import LocalEngine

CPU = torch.device("cpu")


class Machine:
    """A clock and the CPU time of other processes."""

    def __init__(self) -> None:
        self.now = 100.0
        self.others = 5.0

    def run(self, seconds: float, *, others: float) -> None:
        """Let time pass; other processes use `others` cores."""
        self.now += seconds
        self.others += seconds * others


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Restores the process's number after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def threads_of(machine: Machine, *, maximum: int, num_cores: int) -> CpuThreads:
    torch.set_num_threads(maximum)
    return CpuThreads(maximum, num_cores, lambda: machine.others, now=machine.now)


def adjust_if_due(threads: CpuThreads, machine: Machine) -> None:
    """As the engine does before each step."""
    if machine.now >= threads.due_at:
        threads.adjust(machine.now)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize(
    ("others", "expected"),
    [(0.0, 4), (0.4, 4), (0.6, 3), (1.0, 3), (2.3, 2), (3.0, 1), (3.9, 1), (40.0, 1)],
)
def test_the_threads_are_the_cores_that_others_leave(
    machine: Machine, others: float, expected: int
) -> None:
    threads = threads_of(machine, maximum=4, num_cores=4)
    machine.run(1.0, others=others)
    adjust_if_due(threads, machine)
    assert torch.get_num_threads() == expected


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize(
    ("num_cores", "intervals"),
    [
        pytest.param(
            2,
            [(1.5, 1.0, 1), (1.5, 1.0, 1), (1.5, 0.0, 2), (1.5, 0.7, 1), (1.5, 0.1, 2)],
            id="load-that-ends",
        ),
        pytest.param(8, [(1.0, 5.0, 2), (1.0, 7.0, 1)], id="fewer-than-the-cores"),
        pytest.param(
            2, [(0.3, 2.0, 2), (0.7, 0.0, 1), (1.0, 0.0, 2)], id="averaged-over-the-interval"
        ),
    ],
)
def test_two_threads_follow_the_load(
    machine: Machine, num_cores: int, intervals: list[tuple[float, float, int]]
) -> None:
    threads = threads_of(machine, maximum=2, num_cores=num_cores)
    for seconds, others, expected in intervals:
        machine.run(seconds, others=others)
        adjust_if_due(threads, machine)
        assert torch.get_num_threads() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/stat")
def test_the_time_of_others_is_that_of_the_given_cores_without_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9999 9999 9999 9999 9999 9999 9999 9999 9999 9999\n"
        # user nice system idle iowait irq softirq steal guest guest_nice
        "cpu0 1000 200 300 7777 6666 10 20 30 500 100\n"
        "cpu1 5000 5000 5000 5000 5000 5000 5000 5000 0 0\n"
        "cpu2 2000 0 0 8888 0 0 0 0 0 0\n"
        "intr 12345 0 0\nctxt 99\n"
    )
    monkeypatch.setattr(cpu_threads, "_STAT", stat)
    own = os.times()
    hertz = os.sysconf("SC_CLK_TCK")
    expected = (1560 + 2000) / hertz - own.user - own.system
    assert cpu_threads._others({0, 2}) == pytest.approx(expected, abs=0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/stat")
def test_a_child_process_is_another_process() -> None:
    cores = os.sched_getaffinity(0)
    before = cpu_threads._others(cores)
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", burn], check=True, timeout=60)
    assert cpu_threads._others(cores) - before >= 0.4


@pytest.mark.usefixtures("num_threads")
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/stat")
def test_a_real_load_takes_a_thread_away() -> None:
    torch.set_num_threads(2)
    threads = open_cpu_threads(CPU, time.monotonic())
    cores = os.sched_getaffinity(0)
    burn = "while True: pass"
    burners = [subprocess.Popen([sys.executable, "-c", burn]) for _ in cores]
    try:
        deadline = time.monotonic() + 60
        while torch.get_num_threads() > 1 and time.monotonic() < deadline:
            time.sleep(0.1)
            if (now := time.monotonic()) >= threads.due_at:
                threads.adjust(now)
        assert torch.get_num_threads() == 1
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


@pytest.mark.usefixtures("num_threads")
def test_nothing_is_adjusted_where_the_number_is_fixed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.set_num_threads(2)
    assert open_cpu_threads(torch.device("cuda"), 0.0).due_at == math.inf
    torch.set_num_threads(1)
    assert open_cpu_threads(CPU, 0.0).due_at == math.inf
    torch.set_num_threads(2)
    monkeypatch.setattr(cpu_threads, "_STAT", tmp_path / "missing")
    assert open_cpu_threads(CPU, 0.0).due_at == math.inf


@pytest.mark.usefixtures("num_threads")
def test_an_engine_adjusts_its_threads_before_a_step(tiny_base: Path, tmp_path: Path) -> None:
    engine = LocalEngine(tiny_base, tmp_path)
    loads = chain([0.0], count(10**12, 10**12))
    torch.set_num_threads(2)
    threads = CpuThreads(2, 2, lambda: float(next(loads)), now=0.0)
    executor = engine.core._executor
    executor._cpu_threads = threads
    assert engine.generate([1, 2, 3])
    assert torch.get_num_threads() == 1
