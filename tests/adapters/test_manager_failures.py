"""A load that fails is tried again after a back-off, and harms no other."""

from __future__ import annotations

import pytest

from loraplex.adapters.errors import ObjectCorrupt
from loraplex.adapters.manager import Failure
from loraplex.adapters.record import MAX_BACKOFF_SECONDS
from support.blocks import make_key
from support.manager import ManagerWorld

A, B, C, D = (make_key(name) for name in "abcd")


def test_a_failed_fetch_is_reported_and_tried_again_after_a_growing_back_off() -> None:
    world = ManagerWorld()
    manager = world.manager
    failure = Failure("store_unavailable", "no answer")
    waits = []
    manager.request(A)
    for _ in range(9):
        assert manager.failure(A) is None
        world.wanted.clear()
        manager.fetch_failed(A, *failure)
        failed_at = world.now
        while A not in world.wanted:
            assert manager.failure(A) == failure
            assert manager.acquire(A, "r") is None
            world.now += 0.25
            manager.request(A)
        waits.append(world.now - failed_at)
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


def test_a_success_ends_the_back_off() -> None:
    world = ManagerWorld()
    for _ in range(4):
        world.manager.request(A)
        world.manager.fetch_failed(A, "store_unavailable", "no answer")
        world.wanted.clear()
        world.now += MAX_BACKOFF_SECONDS
    world.load(A, 4)
    assert world.resident() == {A}
    assert world.manager.failure(A) is None


def test_a_failure_whose_cause_was_mended_is_tried_again_at_once() -> None:
    world = ManagerWorld()
    world.manager.request(A)
    world.manager.fetch_failed(A, "object_not_found", "gone")
    world.manager.request(A)
    assert world.manager.failure(A) is not None, "it backs off"
    world.manager.forgive(A)
    world.manager.forgive(B)
    assert world.manager.failure(A) is None
    world.load(A, 4)
    assert world.resident() == {A}
    world.manager.forgive(A)
    assert world.resident() == {A}, "what did not fail stays as it is"


def test_one_adapters_failure_leaves_the_others_alone() -> None:
    world = ManagerWorld()
    world.manager.request(A)
    world.manager.fetch_failed(A, "object_not_found", "gone")
    world.load(B, 4)
    assert world.resident() == {B}
    assert world.manager.failure(B) is None


def test_a_corrupt_file_fails_with_its_code() -> None:
    world = ManagerWorld()
    world.manager.request(A)
    world.fetch(A, ObjectCorrupt("not this adapter's block"))
    world.settle()
    assert world.manager.failure(A) == Failure("object_corrupt", "not this adapter's block")


def test_an_unforeseen_error_is_told_without_its_details() -> None:
    world = ManagerWorld()
    world.manager.request(A)
    world.fetch(A, OSError("/secret/path: input/output error"))
    world.settle()
    failure = world.manager.failure(A)
    assert failure is not None
    assert failure.code == "adapter_load_failed"
    assert "secret" not in failure.message


def test_a_failed_copy_gives_back_its_extent_and_its_use_of_host_memory() -> None:
    world = ManagerWorld(arena=4)
    world.manager.request(A)
    world.fetch(A, 4)
    world.manager.poll()
    world.loaders.run()
    world.manager.poll()
    world.loaders.run(error=RuntimeError("device lost"))
    world.manager.poll()
    assert world.manager.failure(A) is not None
    world.settle()
    assert world.arena.used == 0
    assert not world.host.in_use
    world.load(B, 4)
    assert world.resident() == {B}


def test_a_file_that_vanished_before_it_was_read_is_fetched_again_once() -> None:
    world = ManagerWorld()
    world.manager.request(A)
    world.fetch(A, FileNotFoundError())
    world.settle()
    assert world.wanted == [A]
    assert world.manager.failure(A) is None
    world.fetch(A, FileNotFoundError())
    world.settle()
    assert world.wanted == []
    assert world.manager.failure(A) is not None


@pytest.mark.parametrize(("arena", "host"), [(4, 100), (100, 4)])
def test_an_adapter_larger_than_the_arena_or_host_memory_fails(arena: int, host: int) -> None:
    world = ManagerWorld(arena=arena, host=host)
    world.load(A, 5)
    failure = world.manager.failure(A)
    assert failure is not None
    assert failure.code == "adapter_too_large"
    assert not world.host.in_use
    world.load(B, 4)
    assert world.resident() == {B}


def test_long_past_failures_are_forgotten() -> None:
    world = ManagerWorld()
    for index in range(50):
        key = make_key(str(index))
        world.manager.request(key)
        world.manager.fetch_failed(key, "object_not_found", "gone")
        world.now += MAX_BACKOFF_SECONDS
    assert len(world.reports.snapshot()) <= 3
