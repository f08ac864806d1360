from __future__ import annotations

from pathlib import Path

from loraplex.engine.heartbeat import SILENT_LOOKS, Heartbeat, StallWatch


def test_what_one_process_writes_the_other_reads(tmp_path: Path) -> None:
    read = Heartbeat(tmp_path / "heartbeat")
    assert (read.count, read.step_request_ids) == (0, frozenset())
    written = Heartbeat(tmp_path / "heartbeat")
    written.beat()
    written.begin_step(["first", "second"])
    assert read.step_request_ids == {"first", "second"}
    assert read.count == 2
    written.begin_step(["x"])
    assert read.step_request_ids == {"x"}
    written.begin_step([])
    assert read.step_request_ids == frozenset()
    assert read.count == 4


def test_a_step_of_more_names_than_there_is_room_for_is_cut(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "heartbeat")
    ids = [f"request-{number:05}" for number in range(10_000)]
    heartbeat.begin_step(ids)
    assert 4000 < len(heartbeat.step_request_ids & set(ids)) < 10_000


def test_silence_with_work_is_a_stall_and_progress_is_none() -> None:
    watch = StallWatch()
    looks = [watch.look(5, has_work=True) for _ in range(SILENT_LOOKS + 1)]
    assert looks == [False] * SILENT_LOOKS + [True]
    assert not watch.look(6, has_work=True)
    assert not any(watch.look(6, has_work=True) for _ in range(SILENT_LOOKS - 1))


def test_an_idle_process_owes_no_progress() -> None:
    watch = StallWatch()
    assert not any(watch.look(5, has_work=False) for _ in range(100))
    looks = [watch.look(5, has_work=True) for _ in range(SILENT_LOOKS)]
    assert looks == [False] * (SILENT_LOOKS - 1) + [True], "the time counts from the first work on"


def test_slow_progress_is_no_stall() -> None:
    watch = StallWatch()
    counts = [number // (SILENT_LOOKS - 1) for number in range(500)]
    assert not any(watch.look(count, has_work=True) for count in counts)
