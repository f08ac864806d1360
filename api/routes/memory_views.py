"""Converts memory maps to the views of operators and tenants."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ...adapters.disk_cache import CachedFile, file_name
from ...adapters.identity import AdapterKey
from ...adapters.status import ExtentUse, HostUse
from ...engine.messages import AdapterKvUse
from ...platform.adapters.repository import LiveContent
from ...platform.keys.principal import Principal
from ..schemas.memory import (
    CachedAdapterView,
    CacheMemoryView,
    DeviceMemoryView,
    ExtentView,
    KvMemoryView,
    KvUseView,
    ServerMemoryView,
    TrainerMemoryView,
)
from ..schemas.ranks import RankView
from ..telemetry.memories import SeenMap, ServerMap
from ..telemetry.trainer_memories import TrainerMemory


class PlatformMemoryViews:
    """Everything, by name."""

    def __init__(self, contents: Iterable[LiveContent], slugs: Mapping[str, str]) -> None:
        """`contents` by name, as they are named; `slugs` by tenant id."""
        self._slugs = slugs
        self._contents: defaultdict[AdapterKey, list[LiveContent]] = defaultdict(list)
        for content in contents:
            self._contents[content.key].append(content)
        self._files = {file_name(key): key for key in self._contents}

    def server(self, seen: SeenMap) -> ServerMemoryView:
        content = seen.content
        return ServerMemoryView(
            server_id=seen.server_id,
            seen_at=seen.seen_at,
            plan=content.plan,
            ranks=list(map(RankView.of, content.engine.ranks)),
            device=self._device(content),
            kv=self._kv(content),
            prefixes=content.prefixes,
            border=content.border,
            host=CacheMemoryView(
                capacity_bytes=content.host_capacity_bytes,
                used_bytes=content.engine.host_used_bytes,
                entries=[self._host_entry(use) for use in content.engine.host],
            ),
            disk=CacheMemoryView(
                capacity_bytes=content.disk_capacity_bytes,
                used_bytes=content.disk_used_bytes,
                entries=[
                    self._disk_entry(key, file)
                    for name, file in content.disk.items()
                    if (key := self._files.get(name)) is not None
                ],
            ),
            trainers=list(map(self._trainer, content.trainers)),
        )

    def _trainer(self, trainer: TrainerMemory) -> TrainerMemoryView:
        return TrainerMemoryView(
            job=trainer.job_id,
            tenant=self._tenant(trainer.tenant_id),
            adapter=trainer.adapter,
            resident_bytes=trainer.resident_bytes,
            step_bytes=trainer.step_bytes,
        )

    def _device(self, content: ServerMap) -> DeviceMemoryView:
        engine = content.engine
        is_full = not engine.free_bytes
        return DeviceMemoryView(
            name=content.device,
            arena_bytes=content.arena_bytes,
            used_bytes=content.arena_bytes - engine.free_bytes,
            free_bytes=engine.free_bytes,
            largest_free_bytes=engine.largest_free_bytes,
            fragmentation=0.0 if is_full else 1 - engine.largest_free_bytes / engine.free_bytes,
            extents=[
                self._extent(use, use.offset_bytes, use.eviction_order) for use in engine.extents
            ],
        )

    def _kv(self, content: ServerMap) -> KvMemoryView:
        kv = content.engine.kv
        return KvMemoryView(
            num_blocks=kv.num_blocks,
            block_size=content.kv_block_size,
            bytes_per_block=kv.bytes_per_block,
            free_blocks=kv.num_empty,
            cached_blocks=kv.num_cached,
            used_blocks=kv.num_used,
            by_adapter=self._kv_uses(content.engine.lines),
        )

    def _extent(self, use: ExtentUse, offset: int | None, order: int | None) -> ExtentView:
        adapter, version, names, composition = self._name(use.key)
        return ExtentView(
            offset=offset,
            bytes=use.num_bytes,
            tenant=self._tenant(use.key.tenant_id),
            adapter=adapter,
            version=version,
            names=names,
            composition=composition,
            digest=use.key.digest,
            state=use.state,
            pinned=use.is_pinned,
            leases=use.num_leases,
            idle_seconds=use.idle_seconds,
            eviction_order=order,
        )

    def _kv_uses(self, lines: Iterable[AdapterKvUse]) -> list[KvUseView]:
        return [
            KvUseView(self._tenant(line.tenant_id), *self._name(line.adapter), line.num_kv_blocks)
            for line in lines
            if line.num_kv_blocks
        ]

    def _host_entry(self, use: HostUse) -> CachedAdapterView:
        return self._cached(use.key, use.num_bytes, use.is_pinned, int(use.is_in_use))

    def _disk_entry(self, key: AdapterKey, file: CachedFile) -> CachedAdapterView:
        return self._cached(key, file.size_bytes, False, 0)

    def _cached(
        self, key: AdapterKey, num_bytes: int, is_pinned: bool, num_leases: int
    ) -> CachedAdapterView:
        adapter, version, names, composition = self._name(key)
        return CachedAdapterView(
            tenant=self._tenant(key.tenant_id),
            adapter=adapter,
            version=version,
            names=names,
            composition=composition,
            digest=key.digest,
            bytes=num_bytes,
            pinned=is_pinned,
            leases=num_leases,
        )

    def _name(self, key: AdapterKey | None) -> tuple[str | None, int | None, list[str], str | None]:
        """The first adapter and version with this content, the names of all of them, and what a
        composition is made of.

        The names of a composition are those of all its adapters.
        """
        parts = () if key is None else key.parts
        found = [content for part in parts for content in self._contents.get(part, [])]
        if not found:
            return None, None, [], None
        names = list(map(_versioned, found))
        return found[0].adapter_name, found[0].number, names, self._composition(key)

    def _composition(self, key: AdapterKey | None) -> str | None:
        """`a@3+b@1:0.5`; of an adapter that was just deleted, its digest."""
        if key is None or not key.members:
            return None
        contents = [self._contents.get(part, []) for part in key.parts]
        return "+".join(
            (_versioned(named[0]) if named else member.digest)
            + ("" if member.weight == 1.0 else f":{member.weight!r}")
            for member, named in zip(key.members, contents, strict=True)
        )

    def _tenant(self, tenant_id: str) -> str:
        return self._slugs.get(tenant_id, "")


def _versioned(content: LiveContent) -> str:
    return f"{content.adapter_name}@{content.number}"


class OwnMemoryViews(PlatformMemoryViews):
    """A tenant's own entries; sums include only these, and data about other tenants is omitted."""

    def __init__(self, contents: Sequence[LiveContent], principal: Principal) -> None:
        """`contents`: those that the caller may see."""
        super().__init__(contents, {principal.tenant_id: principal.tenant_slug})
        self._principal = principal

    def server(self, seen: SeenMap) -> ServerMemoryView:
        content = seen.content
        host = [self._host_entry(use) for use in content.engine.host if self._has(use.key)]
        disk = [
            self._disk_entry(self._files[name], file)
            for name, file in content.disk.items()
            if name in self._files
        ]
        return ServerMemoryView(
            server_id=seen.server_id,
            seen_at=seen.seen_at,
            plan=[],
            ranks=[],
            device=self._device(content),
            kv=self._kv(content),
            prefixes=[],
            border=None,
            host=CacheMemoryView(None, sum(entry.bytes for entry in host), host),
            disk=CacheMemoryView(None, sum(entry.bytes for entry in disk), disk),
            trainers=[self._trainer(each) for each in content.trainers if self._trains(each)],
        )

    def _device(self, content: ServerMap) -> DeviceMemoryView:
        own = [
            self._extent(use, None, None) for use in content.engine.extents if self._has(use.key)
        ]
        return DeviceMemoryView(
            name=content.device,
            arena_bytes=None,
            used_bytes=sum(extent.bytes for extent in own),
            free_bytes=None,
            largest_free_bytes=None,
            fragmentation=None,
            extents=sorted(own, key=lambda extent: (extent.adapter or "", extent.version or 0)),
        )

    def _kv(self, content: ServerMap) -> KvMemoryView:
        own = self._kv_uses(line for line in content.engine.lines if self._is_visible(line))
        return KvMemoryView(
            num_blocks=None,
            block_size=content.kv_block_size,
            bytes_per_block=content.engine.kv.bytes_per_block,
            free_blocks=None,
            cached_blocks=None,
            used_blocks=sum(use.blocks for use in own),
            by_adapter=own,
        )

    def _is_visible(self, line: AdapterKvUse) -> bool:
        if line.tenant_id != self._principal.tenant_id:
            return False
        if line.adapter is None:
            return self._principal.may_use(None)
        return self._has(line.adapter)

    def _trains(self, trainer: TrainerMemory) -> bool:
        is_own = trainer.tenant_id == self._principal.tenant_id
        return is_own and self._principal.may_use(trainer.adapter)

    def _has(self, key: AdapterKey) -> bool:
        return all(part in self._contents for part in key.parts)
