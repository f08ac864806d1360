"""The client's list of adapters, made of the changes that snapshots report."""

from __future__ import annotations

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.status import AdapterStatus
from loraplex.adapters.tier import Tier
from loraplex.engine.messages import EngineStats
from loraplex.engine.process.known_adapters import KnownAdapters
from support.blocks import make_key


def make_status(name: str, tier: Tier = Tier.DEVICE, num_leases: int = 0) -> AdapterStatus:
    return AdapterStatus(make_key(name), tier, 10, num_leases)


def completed(
    known: KnownAdapters, *statuses: AdapterStatus, gone: list[AdapterKey] | None = None
) -> list[AdapterStatus]:
    changed = list(statuses)
    stats = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, adapters=changed, gone_adapters=gone or [])
    complete = known.complete(stats)
    assert complete.gone_adapters == []
    return complete.adapters


def test_what_a_snapshot_does_not_name_stays_as_it_was() -> None:
    known = KnownAdapters()
    a, b, c = (make_status(name) for name in "abc")
    assert completed(known, a, b, c) == [a, b, c]
    assert completed(known) == [a, b, c]
    moved = make_status("c", Tier.HOST)
    assert completed(known, moved) == [moved, a, b]


def test_what_is_gone_is_listed_no_more_until_it_is_named_again() -> None:
    known = KnownAdapters()
    a, b = make_status("a"), make_status("b")
    completed(known, a, b)
    assert completed(known, gone=[a.key, make_key("unknown")]) == [b]
    assert completed(known, a) == [a, b]


def test_leased_adapters_come_before_those_that_changed_later() -> None:
    known = KnownAdapters()
    leased, idle = make_status("a", num_leases=2), make_status("b")
    completed(known, leased)
    assert completed(known, idle) == [leased, idle]
