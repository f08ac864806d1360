"""What a tenant sees of a server's memory: its own entries, and of others not even their sums."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from loraplex.adapters.disk_cache import CachedFile, file_name
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.status import ExtentUse, HostUse
from loraplex.api.routes.memory_views import OwnMemoryViews, PlatformMemoryViews
from loraplex.api.schemas.memory import ServerMemoryView
from loraplex.api.schemas.memory_tiers import BorderView, PrefixTierView
from loraplex.api.telemetry.memories import SeenMap, ServerMap
from loraplex.api.telemetry.trainer_memories import TrainerMemory
from loraplex.engine.messages import AdapterKvUse, EngineStats, KvUse, MemoryMap, RankStats
from loraplex.platform.adapters.repository import LiveContent
from loraplex.platform.base import utc_now
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_digest
from support.identity import caller_of

BOT, CAT, THEIRS = (
    AdapterKey(tenant_id, make_digest(content))
    for tenant_id, content in (("acme", "bot"), ("acme", "cat"), ("globex", "bot"))
)
KEYS = (BOT, CAT, THEIRS)
STATS = EngineStats(
    *(0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    kv_cache_bytes=800,
    arena_bytes=200,
    num_border_moves=3,
    device_prefix_bytes=640,
    host_prefix_capacity_bytes=500,
    bytes_to_host=60,
)


def make_map() -> SeenMap:
    """Each adapter is in every tier; requests for each and for the base hold KV blocks."""
    lines = [
        AdapterKvUse(tenant_id, adapter, 1, 0, num_blocks)
        for tenant_id, adapter, num_blocks in (
            ("acme", BOT, 1),
            ("acme", CAT, 2),
            ("acme", None, 4),
            ("globex", THEIRS, 8),
            ("globex", None, 16),
        )
    ]
    engine = MemoryMap(
        number=1,
        extents=[ExtentUse(key, 0, 10, "idle", False, 0, 1.0, 0) for key in KEYS],
        host=[HostUse(key, 20, False, False) for key in KEYS],
        kv=KvUse(num_blocks=64, bytes_per_block=2, num_empty=33, num_cached=0, num_used=31),
        lines=lines,
        free_bytes=70,
        largest_free_bytes=70,
        host_used_bytes=60,
        arena_bytes=100,
        ranks=[RankStats(rank, 1000, 500, 64, 100, 30, 100, 60) for rank in (0, 1)],
    )
    content = ServerMap(
        device="cpu",
        arena_bytes=100,
        kv_block_size=16,
        host_capacity_bytes=100,
        disk_capacity_bytes=100,
        disk_used_bytes=90,
        engine=engine,
        disk={file_name(key): CachedFile(30, 0.0) for key in KEYS},
        prefixes=PrefixTierView.tiers_of(STATS),
        border=BorderView.of(STATS),
        trainers=[
            TrainerMemory(f"job-{tenant_id}-{name}", tenant_id, name, 400, 50)
            for tenant_id, name in (("acme", "bot"), ("acme", "cat"), ("globex", "bot"))
        ],
    )
    return SeenMap("here", utc_now(), content)


def view(names: Iterable[str], *, adapters: Iterable[str] | None = None) -> ServerMemoryView:
    """What a caller of acme sees that may see the adapters `names`."""
    contents = [LiveContent(AdapterKey("acme", make_digest(name)), name, 1) for name in names]
    principal = caller_of(Tenant(id="acme", slug="acme"), adapters=adapters)
    return OwnMemoryViews(contents, principal).server(make_map())


def test_a_tenant_sees_its_own_entries_and_their_sums() -> None:
    seen = view(["bot", "cat"])
    assert [extent.adapter for extent in seen.device.extents] == ["bot", "cat"]
    assert [entry.adapter for entry in seen.host.entries] == ["bot", "cat"]
    assert [entry.adapter for entry in seen.disk.entries] == ["bot", "cat"]
    used = (seen.device.used_bytes, seen.host.used_bytes, seen.disk.used_bytes)
    assert used == (20, 40, 60)
    assert [(use.adapter, use.blocks) for use in seen.kv.by_adapter] == [
        ("bot", 1),
        ("cat", 2),
        (None, 4),
    ]
    assert seen.kv.used_blocks == 7


def test_the_platform_sees_the_ranks_of_a_group() -> None:
    seen = PlatformMemoryViews([], {}).server(make_map())
    assert [(rank.rank, rank.resident_bytes) for rank in seen.ranks] == [(0, 1000), (1, 1000)]


def test_the_platform_sees_the_tiers_of_prefixes_and_the_border_and_a_tenant_does_not() -> None:
    seen, own = PlatformMemoryViews([], {}).server(make_map()), view(["bot"])
    tiers = [(each.tier, each.used_bytes, each.copied_in_bytes) for each in seen.prefixes]
    assert tiers == [("device", 640, 0), ("host", 0, 60)], "there is no disk"
    assert seen.border == BorderView(arena_bytes=200, kv_cache_bytes=800, moves=3)
    assert (own.prefixes, own.border) == ([], None)


def test_a_map_with_tiers_is_read_as_it_was_stored_for_other_servers() -> None:
    stored = make_map().content
    read = msgspec.convert(msgspec.to_builtins(stored), ServerMap)
    assert (read.prefixes, read.border) == (stored.prefixes, stored.border)
    assert len(read.prefixes) == 2


def test_the_platform_sees_all_trainers_and_a_tenant_those_of_its_jobs() -> None:
    slugs = {"acme": "acme", "globex": "globex"}
    seen = PlatformMemoryViews([], slugs).server(make_map())
    assert [(each.tenant, each.adapter) for each in seen.trainers] == [
        ("acme", "bot"),
        ("acme", "cat"),
        ("globex", "bot"),
    ]
    assert [each.job for each in view([]).trainers] == ["job-acme-bot", "job-acme-cat"]
    (restricted,) = view(["cat"], adapters=["cat"]).trainers
    assert (restricted.job, restricted.resident_bytes, restricted.step_bytes) == (
        "job-acme-cat",
        400,
        50,
    )


def test_a_restricted_key_sees_its_adapters_alone_and_not_the_bases_requests() -> None:
    seen = view(["cat"], adapters=["cat"])
    assert [extent.adapter for extent in seen.device.extents] == ["cat"]
    assert [entry.adapter for entry in (*seen.host.entries, *seen.disk.entries)] == ["cat", "cat"]
    assert [(use.adapter, use.blocks) for use in seen.kv.by_adapter] == [("cat", 2)]
    assert seen.kv.used_blocks == 2


def test_a_tenant_does_not_learn_how_much_there_is_and_what_is_free() -> None:
    seen = view(["bot"])
    device, kv = seen.device, seen.kv
    hidden = (
        *(device.arena_bytes, device.free_bytes, device.largest_free_bytes, device.fragmentation),
        *(kv.num_blocks, kv.free_blocks, kv.cached_blocks),
        *(seen.host.capacity_bytes, seen.disk.capacity_bytes),
    )
    assert set(hidden) == {None}
    assert seen.ranks == []
    (extent,) = device.extents
    assert (extent.offset, extent.eviction_order) == (None, None)
