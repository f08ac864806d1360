"""A server whose trainers have CPUs and memory of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.server import serving
from support.tuning_jobs import create, ended

CPUS = sorted(os.sched_getaffinity(0))


@pytest.mark.slow
@pytest.mark.skipif(len(CPUS) < 2, reason="the engine needs a CPU too")
def test_the_engine_leaves_trainers_their_cpus_and_their_memory(
    tiny_base: Path, tmp_path: Path
) -> None:
    own, *rest = CPUS
    options = ("--tuning", "--tuning-cpus", str(own), "--tuning-bytes", str(700 << 20))
    name = ("--served-model-name", "tiny")
    with serving(
        tiny_base, tmp_path, *name, *options, TEST_TRAINER="support.fake_trainer"
    ) as server:
        engine = server.engine_pid()
        threads = [int(path.name) for path in Path(f"/proc/{engine}/task").iterdir()]
        others = [each for each in threads if os.sched_getaffinity(each) != set(rest)]
        assert len(others) <= 1 < len(threads), "one thread does nothing but watch the parent"
        assert engine not in others
        caller = server.make_caller("acme")
        assert ended(caller.openai, create(caller.openai).id).status == "succeeded"
        log = server.log.read_text()
    assert "left for trainers 700.0 MiB" in log
    assert "a trainer on cpu 512." in log
