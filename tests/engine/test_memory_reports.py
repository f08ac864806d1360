"""The engine's memory report."""

from __future__ import annotations

from loraplex.engine.messages import AdapterKvUse, MemoryMap
from loraplex.engine.reports.memory import map_memory
from support.blocks import make_key
from support.manager import ManagerWorld
from support.scheduling import SchedulerBench

BYTES = 512


def mapped(bench: SchedulerBench, world: ManagerWorld | None = None) -> MemoryMap:
    manager = (world or ManagerWorld()).manager
    return map_memory(7, manager, bench.scheduler, bench.kv, kv_block_bytes=[BYTES])


def test_blocks_are_empty_cached_or_used() -> None:
    bench = SchedulerBench(num_blocks=8, budget=64, max_num_seqs=1, prefix_caching=True)
    before = mapped(bench).kv
    assert (before.num_blocks, before.num_empty, before.num_cached, before.num_used) == (8, 8, 0, 0)
    assert before.bytes_per_block == BYTES
    bench.add("one", 8, max_tokens=2)
    bench.step()
    during = mapped(bench).kv
    assert during.num_used > 0
    assert during.num_empty + during.num_cached + during.num_used == during.num_blocks
    bench.run()
    after = mapped(bench).kv
    assert after.num_used == 0
    assert after.num_cached > 0, "its prompt may be asked again"
    assert after.num_empty + after.num_cached == after.num_blocks


def test_each_tenants_requests_are_told_by_their_adapter() -> None:
    bench = SchedulerBench(budget=64, max_num_seqs=2)
    key = make_key("bot", "acme")
    bench.manager.resident.add(key)
    bench.add("adapted", 4, tenant="acme", max_tokens=9, adapter=key)
    bench.add("plain", 4, tenant="acme", max_tokens=9)
    bench.step()
    bench.add("late", 4, tenant="bolt")
    found = {(line.tenant_id, line.adapter): line for line in mapped(bench).lines}
    assert set(found) == {("acme", key), ("acme", None), ("bolt", None)}
    running = found["acme", key]
    assert (running.num_running, running.num_waiting) == (1, 0)
    assert running.num_kv_blocks > 0
    assert found["bolt", None] == AdapterKvUse("bolt", None, 0, 1, 0)


def test_the_arena_is_told_as_it_is() -> None:
    world = ManagerWorld(arena=10)
    world.use(make_key("a"), 4)
    found = mapped(SchedulerBench(), world)
    assert found.number == 7
    assert [extent.num_bytes for extent in found.extents] == [8]
    assert (found.free_bytes, found.largest_free_bytes) == (12, 12)
    assert [entry.num_bytes for entry in found.host] == [8]
    assert found.host_used_bytes == 8
