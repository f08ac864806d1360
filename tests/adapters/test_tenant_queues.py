"""Fair queues of tenants for a bounded number of workers."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from loraplex.adapters.tenant_queues import TenantQueues


def take_all(lines: TenantQueues[str]) -> list[str]:
    """What may begin now, without any of it ending."""
    taken = []
    while next_up := lines.take():
        taken.append(next_up[1])
    return taken


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8, 48])
def test_behind_24_of_another_tenant_at_most_one_more_of_them_begins_first(
    num_workers: int,
) -> None:
    lines: TenantQueues[str] = TenantQueues(num_workers)
    for index in range(24):
        lines.add("a", f"a{index}")
    running = take_all(lines)
    lines.add("b", "b")
    begun = take_all(lines)
    while "b" not in begun:
        assert len(begun) <= 1
        lines.end("a")
        begun += take_all(lines)
    assert running == [f"a{index}" for index in range(len(running))]


@pytest.mark.parametrize(("num_workers", "num_held"), [(1, 1), (2, 1), (3, 2), (4, 2), (48, 24)])
def test_one_tenant_never_holds_all_workers(num_workers: int, num_held: int) -> None:
    lines: TenantQueues[str] = TenantQueues(num_workers)
    for index in range(100):
        lines.add("a", f"a{index}")
    assert len(take_all(lines)) == num_held
    if num_workers > 1:
        lines.add("b", "b0")
        assert take_all(lines) == ["b0"], "a worker was kept for another tenant"


def test_a_tenant_holds_no_more_workers_than_it_may() -> None:
    lines: TenantQueues[str] = TenantQueues(48, max_held=3)
    for tenant in "ab":
        for index in range(10):
            lines.add(tenant, f"{tenant}{index}")
    assert sorted(take_all(lines)) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    lines.end("a")
    assert take_all(lines) == ["a3"]


def test_tenants_take_turns_whatever_they_ask_for() -> None:
    lines: TenantQueues[str] = TenantQueues(1)
    for index in range(5):
        lines.add("a", f"a{index}")
    for tenant in ("b", None):  # None: the server's own work
        for index in range(2):
            lines.add(tenant, f"{tenant}{index}")
    order = []
    while taken := lines.take():
        order.append(taken[1])
        lines.end(taken[0])
    assert order == ["a0", "b0", "None0", "a1", "b1", "None1", "a2", "a3", "a4"]


def test_who_comes_back_at_once_does_not_pass_who_waits() -> None:
    lines: TenantQueues[str] = TenantQueues(1)
    for index in range(3):
        lines.add("a", f"a{index}")
    order = []
    for index in range(6):
        lines.add(f"quick{index % 2}", "quick")
        taken = lines.take()
        assert taken is not None
        order.append(taken[0])
        lines.end(taken[0])
    assert order == ["a", "quick0", "quick1", "a", "quick0", "quick1"]


def test_whose_last_work_was_removed_holds_up_nobody() -> None:
    lines: TenantQueues[str] = TenantQueues(2)
    lines.add("a", "a0")
    lines.add("b", "b0")
    lines.remove("a", "a0")
    lines.remove("a", "a0")
    lines.remove("b", "never added")
    assert take_all(lines) == ["b0"]


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_work_keeps_the_bounds(seed: int) -> None:
    """Nobody exceeds the bound, no worker idles that anybody may have, and each line is a queue."""
    rng = random.Random(seed)
    num_workers = rng.randint(1, 9)
    lines: TenantQueues[tuple[str, int]] = TenantQueues(num_workers)
    running: list[str] = []
    added: Counter[str] = Counter()
    begun: Counter[str] = Counter()
    waited: Counter[str] = Counter()
    for _ in range(600):
        tenant = rng.choice("aaaabbcd")
        if rng.random() < 0.55:
            lines.add(tenant, (tenant, added[tenant]))
            added[tenant] += 1
        elif running:
            lines.end(running.pop(rng.randrange(len(running))))
        idle = num_workers - len(running)
        if taken := lines.take():
            held_by, (owner, number) = taken
            assert owner == held_by
            assert number == begun[owner], "a tenant's work begins in its order"
            assert running.count(owner) < idle
            running.append(owner)
            begun[owner] += 1
            waited[owner] = 0
            for other in "abcd":
                if added[other] > begun[other] and not running.count(other):
                    waited[other] += 1
                    assert waited[other] <= 3, "each other tenant passes once"
        else:
            waiting = [t for t in "abcd" if added[t] > begun[t]]
            assert all(running.count(t) >= idle for t in waiting)
    assert len(lines) == added.total() - begun.total()
    assert len(lines.clear()) == added.total() - begun.total()
    assert lines.take() is None
