"""The Prometheus metrics, and that docs/metrics.md lists all of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.adapters.disk_cache import DiskCacheStats
from loraplex.adapters.fetcher_client import FetcherStats
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.load_times import SecondsHistogram
from loraplex.adapters.manager import Tier
from loraplex.adapters.record import Departure
from loraplex.adapters.status import AdapterStatus, AdapterTierStats
from loraplex.api.inference.sequence_times import ABORTED, FAILED, SequenceTimes
from loraplex.api.telemetry.metrics import Metrics
from loraplex.engine.fleet.handover_counts import HandoverFigures
from loraplex.engine.fleet.replica_view import ReplicaView
from loraplex.engine.messages import (
    EngineStats,
    ErrorInfo,
    LatencyTargets,
    ProposerTotals,
    RankStats,
    ReplicaRole,
    ReplicaState,
    RequestStarted,
    SpeculationStats,
    UtilizationStats,
)
from loraplex.engine.scheduling.tenant_labels import MAX_TENANTS, OTHER_TENANTS
from loraplex.platform.overview.figures import FigureSums

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
STATS = EngineStats(
    num_steps=1,
    num_running=2,
    num_waiting=3,
    num_free_kv_blocks=4,
    num_preemptions=5,
    num_prompt_tokens=6,
    num_cached_tokens=7,
    num_generated_tokens=8,
    num_adapter_loads=11,
    num_adapter_evictions=12,
    adapters=[
        AdapterStatus(AdapterKey("acme", "sha256:0"), tier, 0, 0)
        for tier in (Tier.DEVICE, Tier.DEVICE, Tier.HOST)
    ],
    ranks=[
        RankStats(rank, 100 + rank, 32, 33, 40, 34 + rank, 60, 50 + rank, age_seconds=rank / 2)
        for rank in (0, 1)
    ],
    kv_usage=0.75,
    num_swaps=2,
    num_swapped=1,
    num_prefix_query_tokens=13,
    num_step_sequences=14,
    num_graph_steps=47,
    num_eager_decodes=48,
    host_prefix_bytes=49,
    num_blocks_to_host=50,
    num_blocks_from_host=51,
    num_host_cached_tokens=52,
    disk_prefix_bytes=53,
    disk_prefix_capacity_bytes=54,
    num_blocks_to_disk=55,
    num_blocks_from_disk=56,
    num_blocks_not_to_disk=57,
    num_disk_misreads=58,
    num_disk_waits_given_up=59,
    num_disks_off=1,
    arena_bytes=61,
    kv_cache_bytes=62,
    host_cache_bytes=64,
    num_host_border_moves=65,
    num_border_moves=63,
    utilization=UtilizationStats(15.0, 16.0, 17.0, 0.5, 0.25, 18.0, 19.0),
    tenant_service=[("acme", 20), (OTHER_TENANTS, 21)],
    adapter_tiers=AdapterTierStats(
        bytes_by_tier={Tier.HOST: 22, Tier.DEVICE: 23},
        num_leases=24,
        leased_bytes=25,
        pinned_bytes=26,
        free_bytes=8,
        largest_free_bytes=7,
        evictions={Departure.ROOM: 27, Departure.DELETED: 28},
        num_leases_reaped=29,
        num_moves=30,
        moved_bytes=31,
        load_seconds={"fetch": SecondsHistogram([0.5, 1.0], [3, 2, 1], 4.5)},
    ),
    speculation=[
        SpeculationStats(AdapterKey("acme", "sha256:0"), "ngram", 1, 4, 4, 1.0, 5),
        SpeculationStats(AdapterKey("acme", "sha256:1"), "ngram", 1, 4, 0, 0.25, 0),
        SpeculationStats(None, "ngram", 1, 4, 0, 0.25, 0),
        SpeculationStats(None, "draft", 1, 4, 0, 0.5, 2),
    ],
    speculation_totals=[
        ProposerTotals("ngram", 39, 40, 41, 42.5),
        ProposerTotals("draft", 43, 44, 45, 46.5),
    ],
)
REPLICA = ReplicaView(
    id="one",
    address="gpu-1:7070",
    role=ReplicaRole.PREFILL,
    state=ReplicaState.DRAINING,
    failure=None,
    num_running=3,
    num_waiting=2,
    max_batch=8,
    num_open=4,
    num_resident=5,
    num_loading=1,
    kv_usage=0.25,
    arena_bytes=1 << 30,
    num_restarts=0,
    device="cuda:0",
    handovers=HandoverFigures(num_complete=6, num_given_up=1, num_bytes=7 << 20),
)
FETCHER_STATS = FetcherStats(DiskCacheStats(32, 33, 34, 35, 36, 37), 38)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Recorded:
    """Metrics and what they render as."""

    def __init__(self, stats: EngineStats | None = STATS) -> None:
        self.metrics = Metrics(lambda: stats, lambda: FETCHER_STATS)
        self.clock = Clock()

    def sequence(self, targets: LatencyTargets | None = None) -> SequenceTimes:
        return SequenceTimes(
            self.metrics, arrived_at=self.clock.now, targets=targets, clock=self.clock
        )

    def text(self) -> str:
        return self.metrics.render().decode()

    def value(self, sample: str) -> float:
        (value,) = re.findall(rf"^loraplex_{re.escape(sample)} (\S+)$", self.text(), re.M)
        return float(value)


@pytest.fixture
def recorded() -> Recorded:
    """Everything has happened once."""
    recorded = Recorded()
    metrics = recorded.metrics
    metrics.http.observe(method="GET", route="/r", status=200, code="", seconds=0.5)
    metrics.starts.observe(RequestStarted("r", 0.5, 0.25, Tier.DISK, 16))
    metrics.usage.observe("acme", prompt_tokens=30, completion_tokens=40)
    metrics.usage.observe_resources("acme", step_seconds=1.5, kv_byte_seconds=4000, loaded_bytes=70)
    metrics.observe_expiring_keys("tenant", 1)
    metrics.batches.note_line(is_success=True)
    metrics.tuning.note_job("succeeded")
    metrics.webhooks.note("delivered")
    metrics.canary_rollbacks.labels("error_rate").inc()
    metrics.canary_comparisons.labels("judged").inc()
    metrics.samples.labels("kept").inc()
    metrics.shadow_requests.labels("compared").inc()
    metrics.show_ledger(is_database_away=lambda: False, num_unsettled=lambda: 0)
    metrics.show_disk(free_bytes=lambda: 0, held_bytes=lambda: 0, total_bytes=0)
    metrics.show_fleet(lambda: [REPLICA])
    times = recorded.sequence(LatencyTargets(1.0))
    times.tokens_came(1)
    times.tokens_came(1)
    times.ended("stop")
    return recorded


def test_the_document_lists_every_metric_with_its_type_and_labels(recorded: Recorded) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", DOCUMENT.read_text(), re.M)
    documented = {
        (name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows
    }
    assert len(documented) == len(rows)
    assert documented == set(rendered_families(recorded.text()))


def test_figures_have_the_results_of_objectives() -> None:
    recorded, figures = Recorded(), FigureSums()
    targets = LatencyTargets(1.0, 0.1)
    for seconds in ((0.5, 0.05), (2.0, 0.05), (0.5, 0.2), ()):
        times = SequenceTimes(
            recorded.metrics,
            arrived_at=recorded.clock.now,
            figures=lambda: figures,
            targets=targets,
            targets_set_by="tenant",
            clock=recorded.clock,
        )
        for each in seconds:
            recorded.clock.now += each
            times.tokens_came(1)
        if seconds:
            times.ended("stop")
        else:
            times.was_refused()
    assert (figures.num_judged, figures.num_met) == (4, 1)
    assert figures.objective_counts == dict.fromkeys(
        ("tenant/met", "tenant/ttft", "tenant/itl", "tenant/refused"), 1
    )


def rendered_families(text: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Name, type and labels of each family; one that has no sample cannot tell its labels."""
    families = []
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M):
        if name.endswith("_created"):
            continue
        suffix = "_count" if kind == "histogram" else ""
        labels = re.search(rf"^{name}{suffix}(?:{{(.*)}})? ", text, re.M)
        assert labels, f"{name} has no sample"
        families.append((name, kind, tuple(re.findall(r'(\w+)="', labels[1] or ""))))
    return families


def test_nothing_is_said_of_an_engine_that_is_down() -> None:
    said = Recorded(stats=None).text()
    assert "loraplex_requests_running" not in said
    assert "loraplex_speculation" not in said


def test_preemptions_are_told_by_kind(recorded: Recorded) -> None:
    assert recorded.value('preemptions_total{kind="swap"}') == 2
    assert recorded.value('preemptions_total{kind="recompute"}') == 3


def test_adapters_are_counted_by_where_they_are(recorded: Recorded) -> None:
    tiers = {tier: recorded.value(f'adapters{{tier="{tier}"}}') for tier in Tier}
    assert tiers == {Tier.DEVICE: 2, Tier.HOST: 1, Tier.DISK: 0, Tier.STORE: 0}


def test_the_engines_figures_are_passed_on(recorded: Recorded) -> None:
    assert recorded.value("kv_usage_ratio") == 0.75
    assert recorded.value("arena_bytes") == 61
    assert recorded.value("kv_cache_bytes") == 62
    assert recorded.value("memory_border_moves_total") == 63
    assert recorded.value("host_cache_bytes") == 64
    assert recorded.value("host_memory_border_moves_total") == 65
    assert recorded.value("prefix_cache_query_tokens_total") == 13
    assert recorded.value("prefix_cache_hit_tokens_total") == 7
    assert recorded.value("memory_bandwidth_utilization_ratio") == 0.5
    assert recorded.value("compute_utilization_ratio") == 0.25
    assert recorded.value('tenant_service_tokens_total{tenant_id="acme"}') == 20


def test_the_memory_of_a_rank_is_shown_by_its_number(recorded: Recorded) -> None:
    names = ("resident_bytes", "weight_bytes", "kv_cache_bytes", "arena_bytes")
    shown = [recorded.value(f'rank_{name}{{rank="1"}}') for name in names]
    assert shown == [101, 32, 33, 40]
    assert recorded.value('rank_arena_used_bytes{rank="1"}') == 35
    assert recorded.value('rank_host_cache_used_bytes{rank="0"}') == 50
    assert recorded.value('rank_report_age_seconds{rank="1"}') == 0.5


def test_an_engine_of_one_process_shows_no_rank() -> None:
    assert 'rank="' not in Recorded(stats=replace(STATS, ranks=[])).text()


def test_a_replica_is_shown_by_its_address(recorded: Recorded) -> None:
    names = ("up", "requests_running", "requests_waiting", "kv_usage_ratio", "adapters")
    shown = [recorded.value(f'replica_{name}{{replica="gpu-1:7070"}}') for name in names]
    assert shown == [1, 3, 2, 0.25, 5]


def test_a_replica_out_of_reach_has_no_figures() -> None:
    lost = replace(REPLICA, state=ReplicaState.REFUSING, failure=ErrorInfo("replica_lost", ""))
    recorded = Recorded()
    recorded.metrics.show_fleet(lambda: [lost])
    samples = re.findall(r"^loraplex_replica_\w+{.*", recorded.text(), re.M)
    assert samples == ['loraplex_replica_up{replica="gpu-1:7070"} 0.0']


def test_a_server_with_an_engine_of_its_own_shows_no_replica() -> None:
    recorded = Recorded()
    recorded.metrics.show_fleet(list)
    assert "loraplex_replica" not in recorded.text()


def test_a_sequences_times(recorded: Recorded) -> None:
    recorded = Recorded()
    times = recorded.sequence()
    for seconds, num_tokens in ((2.0, 1), (0.5, 2), (1.0, 1)):
        recorded.clock.now += seconds
        times.tokens_came(num_tokens)
    recorded.clock.now += 0.25
    times.ended("length")
    times.ended(ABORTED)  # closing what has ended
    assert times.first_token_seconds == 2.0
    assert recorded.value("time_to_first_token_seconds_sum") == 2.0
    assert recorded.value("inter_token_latency_seconds_sum") == 1.5
    assert recorded.value("inter_token_latency_seconds_count") == 2
    assert recorded.value("time_per_output_token_seconds_sum") == 1.5 / 3
    assert recorded.value("end_to_end_seconds_sum") == 3.75
    assert recorded.value('sequences_total{finish_reason="length"}') == 1
    assert 'finish_reason="aborted"' not in recorded.text()


def test_a_sequence_that_is_not_whole_has_no_end_to_end_time() -> None:
    recorded = Recorded()
    times = recorded.sequence()
    times.tokens_came(5)
    times.ended(ABORTED)
    assert recorded.value("end_to_end_seconds_count") == 0
    assert recorded.value("time_per_output_token_seconds_count") == 0
    assert recorded.value('sequences_total{finish_reason="aborted"}') == 1


@pytest.mark.parametrize(
    ("targets", "result"),
    [
        (LatencyTargets(2.0, 0.5), "met"),
        (LatencyTargets(2.0, 0.49), "itl"),
        (LatencyTargets(1.9, 0.49), "ttft"),
        (LatencyTargets(None, 0.49), "itl"),
        (LatencyTargets(1.9, None), "ttft"),
    ],
)
def test_a_sequence_counts_by_the_first_target_that_it_missed(
    targets: LatencyTargets, result: str
) -> None:
    recorded = Recorded()
    times = recorded.sequence(targets)
    for seconds, num_tokens in ((2.0, 1), (0.5, 2), (1.0, 1)):  # 0.5 s per token after the first
        recorded.clock.now += seconds
        times.tokens_came(num_tokens)
    times.ended("stop")
    times.ended("stop")
    assert re.findall(
        r'^loraplex_slo_sequences_total{result="(\w+)",set_by="server"} (\S+)$',
        recorded.text(),
        re.M,
    ) == [(result, "1.0")]


def test_refused_and_failed_sequences_miss_the_objective_and_callers_mistakes_do_not_count() -> (
    None
):
    recorded = Recorded()
    refused, failed, mistaken, aborted = (recorded.sequence(LatencyTargets(1.0)) for _ in range(4))
    refused.was_refused()
    refused.ended(FAILED)
    failed.was_failed()
    failed.ended(FAILED)
    mistaken.ended(FAILED)
    aborted.tokens_came(1)
    aborted.ended(ABORTED)
    found = re.findall(r"^loraplex_slo_sequences_total{(.*)} (\S+)$", recorded.text(), re.M)
    assert found == [
        ('result="refused",set_by="server"', "1.0"),
        ('result="failed",set_by="server"', "1.0"),
    ]


@pytest.mark.parametrize("targets", [None, LatencyTargets()])
def test_without_an_objective_no_sequence_counts(targets: LatencyTargets | None) -> None:
    recorded = Recorded()
    times = recorded.sequence(targets)
    times.tokens_came(1)
    times.ended("stop")
    times.was_refused()
    assert "loraplex_slo_sequences_total{" not in recorded.text()


def test_only_so_many_tenants_have_a_label_of_their_own() -> None:
    recorded = Recorded()
    for number in range(MAX_TENANTS + 5):
        recorded.metrics.usage.observe(f"t{number}", prompt_tokens=2, completion_tokens=1)
    kept = re.findall(r'tokens_total{kind="prompt",tenant="t\d+"} 2.0', recorded.text())
    assert len(kept) == MAX_TENANTS
    assert recorded.value(f'tokens_total{{kind="prompt",tenant="{OTHER_TENANTS}"}}') == 2 * 5


def test_what_requests_have_used_is_counted_by_tenant_and_never_without_bound() -> None:
    recorded = Recorded()
    for number in range(MAX_TENANTS + 2):
        recorded.metrics.usage.observe_resources(
            f"t{number}", step_seconds=0.5, kv_byte_seconds=3000, loaded_bytes=7
        )
    for tenant, factor in (("t0", 1), (OTHER_TENANTS, 2)):
        labels = f'{{tenant="{tenant}"}}'
        assert recorded.value(f"tenant_step_seconds_total{labels}") == 0.5 * factor
        assert recorded.value(f"tenant_kv_byte_seconds_total{labels}") == 3000 * factor
        assert recorded.value(f"tenant_loaded_bytes_total{labels}") == 7 * factor


def test_bytes_by_tier_come_from_the_engine_and_the_fetcher(recorded: Recorded) -> None:
    held = {
        tier: recorded.value(f'adapter_tier_bytes{{tier="{tier}"}}')
        for tier in Tier
        if tier != Tier.STORE
    }
    assert held == {Tier.DISK: 32, Tier.HOST: 22, Tier.DEVICE: 23}


def test_a_stage_of_loads_is_a_cumulative_histogram(recorded: Recorded) -> None:
    def count(bound: str) -> float:
        return recorded.value(f'adapter_load_seconds_bucket{{le="{bound}",stage="fetch"}}')

    assert [count("0.5"), count("1.0"), count("+Inf")] == [3, 5, 6]
    assert recorded.value('adapter_load_seconds_count{stage="fetch"}') == 6
    assert recorded.value('adapter_load_seconds_sum{stage="fetch"}') == 4.5


def test_the_disk_and_the_fetcher_are_seen_while_the_engine_is_down() -> None:
    recorded = Recorded(stats=None)
    assert recorded.value('adapter_tier_bytes{tier="disk"}') == 32
    assert recorded.value("fetcher_restarts_total") == 38
    assert "loraplex_adapter_leases " not in recorded.text()


def test_drafts_are_counted_by_proposer(recorded: Recorded) -> None:
    totals = {
        name: [
            recorded.value(f'speculation_{name}_total{{proposer="{proposer}"}}')
            for proposer in ("ngram", "draft")
        ]
        for name in ("drafts", "draft_tokens", "accepted_tokens", "proposing_seconds")
    }
    assert totals == {
        "drafts": [39, 43],
        "draft_tokens": [40, 44],
        "accepted_tokens": [41, 45],
        "proposing_seconds": [42.5, 46.5],
    }


def test_adapters_are_counted_by_whether_drafting_pays_and_never_named(recorded: Recorded) -> None:
    assert recorded.value('speculation_acceptance_ratio{proposer="ngram"}') == 0.5
    assert recorded.value('speculation_acceptance_ratio{proposer="draft"}') == 0.5
    assert recorded.value('speculation_adapters{proposer="ngram",state="on"}') == 1
    assert recorded.value('speculation_adapters{proposer="ngram",state="off"}') == 2
    assert "sha256" not in recorded.text()
