"""The engine's report on its requests."""

from __future__ import annotations

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.messages import ListRequests, RequestList, RequestState
from loraplex.engine.reports.requests import REASONS, list_requests
from support.scheduling import SchedulerBench

ABSENT = AdapterKey("acme", "sha256:aa")


def listed(bench: SchedulerBench, tenant_id: str | None = None, limit: int = 100) -> RequestList:
    return list_requests(ListRequests(7, tenant_id, limit), bench.scheduler, bench.now)


def states(bench: SchedulerBench) -> dict[str, RequestState]:
    return {state.request_id: state for state in listed(bench).requests}


def test_each_request_is_told_with_how_far_it_has_come() -> None:
    bench = SchedulerBench(budget=10, max_num_seqs=2)
    bench.add("short", 3, max_tokens=5)
    bench.add("long", 25)
    bench.step()
    bench.now = 2.0
    bench.add("late", 1)
    found = states(bench)
    assert [found[name].state for name in ("short", "long", "late")] == [
        "decoding",
        "prefilling",
        "waiting",
    ]
    long = found["long"]
    assert (long.num_prompt_tokens, long.num_computed_tokens, long.num_generated_tokens) == (
        25,
        7,
        0,
    )
    assert (found["short"].num_generated_tokens, found["short"].age_seconds) == (1, 2.0)
    assert (found["late"].waits_for, long.waits_for) == ("sequences", None)


def test_a_request_says_that_it_waits_for_its_adapter() -> None:
    bench = SchedulerBench()
    bench.add("cold", 4, adapter=ABSENT)
    bench.step()
    assert states(bench)["cold"].waits_for == "adapter"
    bench.manager.resident.add(ABSENT)
    bench.step()
    assert "cold" not in states(bench) or states(bench)["cold"].state != "waiting"


def test_a_request_says_that_it_waits_for_kv_blocks() -> None:
    bench = SchedulerBench(num_blocks=8, budget=64)
    bench.add("whole", 28, max_tokens=4)
    bench.step()
    bench.add("other", 28, max_tokens=4)
    bench.step()
    assert states(bench)["other"].waits_for == "kv_blocks"


def test_what_has_just_come_waits_for_its_turn() -> None:
    bench = SchedulerBench()
    bench.add("new", 4)
    assert states(bench)["new"].waits_for == "turn"
    assert "turn" in REASONS


def test_one_tenants_list_has_its_own_alone_and_is_cut_to_the_oldest() -> None:
    bench = SchedulerBench(max_num_seqs=1)
    for number, tenant in enumerate(("a", "b", "a", "a")):
        bench.now = float(number)
        bench.add(f"{tenant}{number}", 4, tenant=tenant)
    answer = listed(bench, "a", limit=2)
    assert [state.request_id for state in answer.requests] == ["a0", "a2"]
    assert (answer.number, answer.num_requests) == (7, 3)
    assert {state.tenant_id for state in listed(bench).requests} == {"a", "b"}
