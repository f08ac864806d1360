"""On which replicas of a fleet a tenant's adapters shall be, and where they are."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx
from sqlalchemy import select

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.store import object_key, open_store
from loraplex.engine.fleet.adapter_name import adapter_name
from loraplex.engine.fleet.rendezvous import RendezvousOrder
from loraplex.platform.adapters.models import Adapter, AdapterVersion
from loraplex.platform.adapters.service import (
    NewVersion,
    begin_attestation,
    create_version,
    mark_ready,
)
from loraplex.platform.adapters.states import VersionState
from loraplex.platform.replicas.models import Replica
from loraplex.platform.tenants.models import Tenant
from support.server import Caller, ServerUnderTest

Digest = str
NUM_ADAPTERS = 24
NUM_PINNED = 6
PREFETCH_SECONDS = 3.0
"""Then the wish is forgotten: after a crash, no wish but the pins brings adapters back."""


class Right(NamedTuple):
    """What of the fleet is as it shall be."""

    pins: bool
    """Each pinned adapter is pinned on the first live replica of its order, and nowhere else."""
    targets: bool
    """Each adapter is on the device of the first live replica of its order."""


@dataclass(frozen=True)
class AdapterHomes:
    """A tenant's adapters, some of them pinned, on a fleet of replicas on one database."""

    server: ServerUnderTest
    """One of those on the fleet's database."""
    caller: Caller
    keys: Mapping[str, AdapterKey]
    """By their pinned names."""
    pinned: Set[AdapterKey]

    def look(self, url: str, *, lost: Collection[str] = ()) -> Right:
        """Ask the server at `url`. `lost` are the addresses of replicas that have ended."""
        ids = {address: name for address, name in self._ids().items() if address not in lost}
        held = self._held(url)
        if not ids.keys() <= held.keys():
            return Right(pins=False, targets=False)
        homes = self.homes(ids.values())
        return Right(
            pins=all(
                _pinned(held[address]) == self._digests(homes, self.pinned, name)
                for address, name in ids.items()
            ),
            targets=all(
                self._digests(homes, homes, name) <= held[address].keys()
                for address, name in ids.items()
            ),
        )

    def homes(self, replica_ids: Iterable[str]) -> Mapping[AdapterKey, str]:
        """The first of these replicas in each adapter's order."""
        order = RendezvousOrder(replica_ids)
        return {key: order.of(adapter_name(key))[0] for key in self.keys.values()}

    def _digests(
        self, homes: Mapping[AdapterKey, str], keys: Collection[AdapterKey], replica_id: str
    ) -> Set[Digest]:
        return {key.digest for key in keys if homes[key] == replica_id}

    def _ids(self) -> Mapping[str, str]:
        """By address."""
        database = self.server.database
        with database.platform_transaction(read_only=True) as session:
            found = {row.address: row.id for row in session.scalars(select(Replica))}
        database.close()
        return found

    def _held(self, url: str) -> Mapping[str, Mapping[Digest, bool]]:
        """By the address of each replica that answers: its adapters, and whether it pins them."""
        headers = {"authorization": f"Bearer {self.caller.key}"}
        answer = httpx.get(f"{url}/v1/memory", headers=headers, timeout=30.0)
        return {
            replica["server_id"]: {
                extent["digest"]: extent["pinned"] for extent in replica["device"]["extents"]
            }
            for replica in answer.raise_for_status().json()["servers"]
        }


def _pinned(held: Mapping[Digest, bool]) -> Set[Digest]:
    return {digest for digest, is_pinned in held.items() if is_pinned}


def pin_one_of_each(
    server: ServerUnderTest, api_keys: Mapping[str, str]
) -> Mapping[str, AdapterHomes]:
    """The adapters of tenants with these keys, by the tenant's slug. One of each is pinned."""
    owned = _ready_versions(server)
    return {slug: _pin_one(server, slug, key, owned[slug]) for slug, key in api_keys.items()}


def _pin_one(
    server: ServerUnderTest, slug: str, api_key: str, owned: Sequence[tuple[str, int, AdapterKey]]
) -> AdapterHomes:
    name, number, pinned = owned[0]
    caller = Caller(server.url, pinned.tenant_id, slug, api_key)
    answer = caller.http.put(f"/v1/adapters/{name}/versions/{number}/pin", json={})
    answer.raise_for_status()
    caller.close()
    keys = {f"{slug}/{name}@{number}": key for name, number, key in owned}
    return AdapterHomes(server, caller, keys, frozenset([pinned]))


def _ready_versions(server: ServerUnderTest) -> Mapping[str, list[tuple[str, int, AdapterKey]]]:
    """By the tenant's slug."""
    found: dict[str, list[tuple[str, int, AdapterKey]]] = {}
    columns = select(Tenant.slug, Adapter.name, AdapterVersion)
    joined = columns.join(Adapter, Adapter.tenant_id == Tenant.id).join(
        AdapterVersion, AdapterVersion.adapter_id == Adapter.id
    )
    database = server.database
    with database.platform_transaction(read_only=True) as session:
        for slug, name, version in session.execute(joined):
            if version.state == VersionState.READY:
                key = AdapterKey(version.tenant_id, version.digest)
                found.setdefault(slug, []).append((name, version.number, key))
    database.close()
    return found


def add_adapters(
    server: ServerUnderTest, caller: Caller, store: Path, *, base_id: str
) -> AdapterHomes:
    """Adapters without weights, for fake engines. Some are pinned, and the others were prefetched
    once."""
    names = [f"bot-{number}" for number in range(NUM_ADAPTERS)]
    keys = {
        f"{caller.slug}/{name}@1": _add_adapter(server, caller, store, name, base_id)
        for name in names
    }
    for number, name in enumerate(names):
        version = f"/v1/adapters/{name}/versions/1"
        if number < NUM_PINNED:
            caller.http.put(f"{version}/pin", json={}).raise_for_status()
        else:
            wish = {"ttl_seconds": PREFETCH_SECONDS}
            caller.http.post(f"{version}/prefetch", json=wish).raise_for_status()
    pinned = frozenset(list(keys.values())[:NUM_PINNED])
    return AdapterHomes(server, caller, keys, pinned)


def _add_adapter(
    server: ServerUnderTest, caller: Caller, store: Path, name: str, base_id: str
) -> AdapterKey:
    """A ready version and its block in the store."""
    block = store.with_name(name)
    block.write_text(name)
    sha256 = hashlib.sha256(name.encode()).hexdigest()
    key = AdapterKey(caller.tenant_id, f"sha256:{sha256}")
    open_store(str(store)).put_file(object_key(key), block, sha256=sha256)
    new = NewVersion(
        adapter_name=name,
        digest=key.digest,
        base_id=base_id,
        object_sha256=sha256,
        size_bytes=len(name),
        intake_report={},
    )
    database = server.database
    with database.transaction(caller.tenant_id) as session:
        version = create_version(session, new).version
        begin_attestation(session, version.id)
        mark_ready(session, version.id, attestation_report={})
    database.close()
    return key
