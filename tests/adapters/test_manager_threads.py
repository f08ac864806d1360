"""The real arena, host cache and loader threads together."""

from __future__ import annotations

from contextlib import closing
from itertools import count
from pathlib import Path

import torch

from loraplex.adapters.arena import Arena
from loraplex.adapters.host_cache import HostBlock, HostCache
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.loaders import LoaderThreads
from loraplex.adapters.manager import AdapterManager, Lease, Tier
from support.blocks import StoredBlock, make_key, make_layout, write_block

NUM_ADAPTERS = 24


def holds_its_own_weights(arena: Arena, lease: Lease, stored: StoredBlock) -> bool:
    for index, rank in stored.plan.ranks.items():
        a_offset, b_offset, _ = arena.table[lease.row, index].tolist()
        a, b = stored.matrices(index)
        found_a = arena.flat[a_offset : a_offset + a.numel()].view(rank, -1)
        found_b = arena.flat[b_offset : b_offset + b.numel()].view(rank, -1)
        if not torch.equal(found_a, a) or not torch.equal(found_b, b * stored.scales[index]):
            return False
    return True


def test_every_lease_leads_to_its_own_weights_while_adapters_come_and_go(tmp_path: Path) -> None:
    """24 adapters share room for about 4; a third of them is deleted on the way."""
    stored: dict[AdapterKey, StoredBlock] = {}
    for seed in range(NUM_ADAPTERS):
        key = make_key(str(seed), f"tenant {seed % 3}")
        ranks = {0: 1 + seed % 5, 3: 2, 5: 4}
        stored[key] = write_block(tmp_path / str(seed), key, ranks=ranks, seed=seed)
    largest = max(block.plan.num_elements for block in stored.values())
    arena = Arena(make_layout(), 4 * 4 * largest, torch.float32, torch.device("cpu"))
    host = HostCache(make_layout(), 6 * 4 * largest, torch.float32)
    ticks = count()
    with closing(LoaderThreads(2)) as loaders:
        manager: AdapterManager[HostBlock] = AdapterManager(
            arena=arena,
            host=host,
            loaders=loaders,
            clock=lambda: next(ticks) * 0.01,
            num_soon=2,
        )
        remaining = dict.fromkeys(stored, 6)
        leases: dict[str, Lease] = {}
        for turn in count():
            for key in manager.fetches.take_wanted():
                manager.fetched(key, [stored[key].path], Tier.DISK)
            manager.poll()
            for key in list(remaining):
                lease = manager.acquire(key, f"{key} {remaining[key]}")
                if lease is None:
                    assert manager.failure(key) is None
                    continue
                leases[lease.request_id] = lease
                remaining[key] -= 1
                if not remaining[key]:
                    del remaining[key]
            for lease in leases.values():
                assert arena.published.get(lease.row) == (lease.key, lease.generation)
                assert holds_its_own_weights(arena, lease, stored[lease.key])
            if turn % 4 == 3:
                for request_id in leases:
                    manager.release(request_id)
                leases.clear()
                for key in list(stored)[:: NUM_ADAPTERS // 8]:
                    if key not in remaining:
                        manager.evict(key)
            if not remaining and not leases:
                break
        for key in stored:
            manager.evict(key)
        while manager.reports.snapshot() or manager.has_pending_work:
            manager.poll()
            manager.take_evicted()
            manager.fetches.take_wanted()
            manager.fetches.take_read()
    assert manager.num_evictions > 0
    assert arena.used_bytes == host.used_bytes == 0
    assert not arena.flat.any()
    assert not arena.table.any()
