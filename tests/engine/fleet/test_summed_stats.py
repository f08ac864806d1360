from __future__ import annotations

from dataclasses import fields, replace

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.load_times import SecondsHistogram
from loraplex.adapters.record import Departure
from loraplex.adapters.status import AdapterStatus, AdapterTierStats
from loraplex.adapters.tier import Tier
from loraplex.engine.fleet.summed_stats import sum_stats
from loraplex.engine.messages import (
    EngineStats,
    ProposerTotals,
    SpeculationStats,
    UtilizationStats,
)

X, Y = AdapterKey("acme", "x"), AdapterKey("bolt", "y")


def histogram(count: int) -> SecondsHistogram:
    return SecondsHistogram([1.0], [count, 2 * count], 3.0 * count)


def make_stats(scale: int, adapters: list[AdapterStatus]) -> EngineStats:
    """Every number is a multiple of the scale."""
    return EngineStats(
        **{field.name: (place + 1) * scale for place, field in enumerate(fields(EngineStats)[:10])},  # type: ignore[arg-type]
        adapters=adapters,
        kv_usage=scale / 10,
        utilization=UtilizationStats(step_seconds=float(scale), memory=scale / 10),
        tenant_service=[("acme", 5 * scale), (f"only-{scale}", 1)],
        adapter_tiers=AdapterTierStats(
            bytes_by_tier={Tier.DEVICE: 7 * scale},
            num_leases=scale,
            awaited_bytes=2 * scale,
            loaded_bytes=3 * scale,
            largest_free_bytes=scale,
            evictions={Departure.ROOM: scale},
            load_seconds={"copy": histogram(scale)},
        ),
        speculation=[SpeculationStats(X, "ngram", scale, scale, scale, scale / 10, scale)],
        speculation_totals=[ProposerTotals("ngram", scale, scale, scale, float(scale))],
    )


def test_numbers_are_added_and_shares_are_not() -> None:
    one, two = make_stats(1, []), make_stats(2, [])
    total = sum_stats([one, two])
    for field in fields(EngineStats)[:10]:
        parts = [getattr(each, field.name) for each in (one, two)]
        assert getattr(total, field.name) == sum(parts), field.name
    assert total.kv_usage == 0.2
    assert (total.utilization.step_seconds, total.utilization.memory) == (3.0, 0.15000000000000002)
    assert dict(total.tenant_service) == {"acme": 15, "only-1": 1, "only-2": 1}
    tiers = total.adapter_tiers
    assert (tiers.bytes_by_tier, tiers.num_leases) == ({Tier.DEVICE: 21}, 3)
    assert (tiers.awaited_bytes, tiers.loaded_bytes) == (6, 9)
    assert (tiers.largest_free_bytes, tiers.evictions) == (2, {Departure.ROOM: 3})
    assert tiers.load_seconds == {"copy": SecondsHistogram([1.0], [3, 6], 9.0)}
    assert total.speculation == [SpeculationStats(X, "ngram", 3, 3, 3, 0.2, 2)]
    assert total.speculation_totals == [ProposerTotals("ngram", 3, 3, 3, 3.0)]


def test_an_adapter_has_its_fastest_tier_and_what_all_devices_hold() -> None:
    first = make_stats(1, [AdapterStatus(X, Tier.HOST, 5, 0), AdapterStatus(Y, Tier.DEVICE, 9, 1)])
    second = make_stats(
        1, [AdapterStatus(X, Tier.DEVICE, 5, 2), AdapterStatus(Y, Tier.DEVICE, 9, 3)]
    )
    assert sum_stats([first, second]).adapters == [
        AdapterStatus(X, Tier.DEVICE, 5, 2),
        AdapterStatus(Y, Tier.DEVICE, 18, 4),
    ]


def test_one_engine_is_its_own_sum() -> None:
    only = make_stats(3, [AdapterStatus(X, Tier.DEVICE, 5, 2)])
    assert sum_stats([only]) == replace(only, gone_adapters=[])
