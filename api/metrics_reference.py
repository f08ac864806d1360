"""Generates `docs/metrics.md` (`make docs`)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from ..adapters.fetcher_client import FetcherStats
from ..engine.fleet.handover_counts import HandoverFigures
from ..engine.fleet.replica_view import ReplicaView
from ..engine.messages import EngineStats, ReplicaRole, ReplicaState
from .telemetry.engine_metrics import EngineCollector, RankCollector, UtilizationCollector
from .telemetry.fleet_metrics import FleetCollector
from .telemetry.loop_histogram import LoopHistogram
from .telemetry.metrics import Metrics
from .telemetry.speculation_metrics import SpeculationCollector
from .telemetry.tier_metrics import TierCollector
from .telemetry.vllm_metrics import AskedAdapters, EngineSizes, VllmCollector, VllmSource


class _Section(NamedTuple):
    title: str
    introduction: str
    metrics: Iterable[Metric | MetricWrapperBase | LoopHistogram]
    closing: str


_INTRODUCTION = """\
# Metrics and traces

`GET /metrics` responds in Prometheus' text format. It is open to callers on the same machine, or to
callers with `LORAPLEX_METRICS_TOKEN` or from `--metrics-networks`. Labels are bounded: adapters are
never labels, except [for routers](#under-vllms-names), and only the first 50 tenants since the
start have their own label; the others share `_other`. Codes are listed in [errors.md](errors.md).
"""
_OF_THE_ENGINE = """
These metrics come from the engine's last snapshot (two per second). They are absent while the
engine is down. Their counters restart at 0 with the engine.
"""
_BATCHES = """
Share of the time that the device is busy, sequences per step, step time, and hit rate of the prefix
cache:

```
rate(loraplex_engine_step_seconds_total[1m])
rate(loraplex_engine_step_sequences_total[1m]) / rate(loraplex_engine_steps_total[1m])
rate(loraplex_engine_step_seconds_total[1m]) / rate(loraplex_engine_steps_total[1m])
rate(loraplex_prefix_cache_hit_tokens_total[5m])
  / rate(loraplex_prefix_cache_query_tokens_total[5m])
```
"""
_OF_SPECULATION = """
These metrics are labelled by proposer (`ngram`, `suffix`, `draft`, `early_exit`, `skip`,
`quantized`, `medusa`, `eagle`, `mtp`; all but the first two also with `_tree`).
Those of the engine come from its last snapshot, as above. Adapters are only counted;
`loraplex adapters why` shows the figures of one version.
"""
_DRAFTS = """
Tokens per step with draft tokens, and the acceptance rate:

```
1 + rate(loraplex_speculation_accepted_tokens_total[5m])
  / rate(loraplex_speculation_drafts_total[5m])
rate(loraplex_speculation_accepted_tokens_total[5m])
  / rate(loraplex_speculation_draft_tokens_total[5m])
```
"""
_OF_TIERS = """
The tiers are the store, this machine's disk, host memory and the device. The engine's metrics come
from its last snapshot, as above. The counters of the disk and the fetcher start with the server.
"""
_COLD_STARTS = """
Share of requests whose adapter is on the device, and duration of a cold start:

```
rate(loraplex_adapter_tier_hits_total{tier="device"}[5m])
  / ignoring(tier) sum(rate(loraplex_adapter_tier_hits_total[5m]))
histogram_quantile(0.95, sum by (stage, le) (rate(loraplex_adapter_load_seconds_bucket[5m])))
```
"""
_PEAKS = """
Both ratios cover the steps since the last snapshot; they are 0 if no step ran. The bytes are those
that every implementation must read: each weight once per step (of the experts, those that the
tokens are expected to use; no embeddings), each visible key and value once per sequence, and each
adapter of the batch once. The operations are two per parameter and token, with the output head once
per sequence, and without the operations of attention and LoRA. The peak is measured on this device,
so a small model that fits into a cache may exceed it. Over a longer time:

```
rate(loraplex_engine_moved_bytes_total[1m]) / rate(loraplex_engine_step_seconds_total[1m])
  / loraplex_device_peak_bytes_per_second
```
"""
_OF_RANKS = """
Only a server with `--tensor-parallel-size` above 1 has these metrics. A follower reports its memory
once a second. The group ends if a rank is silent for 8 s.
"""
_OF_REPLICAS = """
Only a server in a [fleet](fleet.md) has these metrics. They show its own connections. A replica
that it cannot reach has only `loraplex_replica_up`. `replica` is the agent's address.
"""
_LOST_REPLICAS = """
Replicas that no server reaches, and the busiest replicas:

```
max by (replica) (loraplex_replica_up) == 0
topk(3, max by (replica) (loraplex_replica_requests_waiting))
```
"""
_UNDER_VLLMS_NAMES = """
Only a server with `--vllm-metrics` has these metrics. They have the values of our own metrics under
the names that routers for vLLM read. Routers send no token: `--metrics-networks` opens `/metrics`
to their network. `vllm:lora_requests_info` has the names in the `model` fields of open requests as
labels, of all tenants. So Prometheus should drop it.
"""
_ROUTERS = """
What reads which name, and whether a server has all of it. The names and labels are those of the
readers' source of 2026. No reader was run against a server: all are untried.

| reader | reads | has |
|---|---|---|
| Endpoint picker of the Gateway API Inference Extension and of llm-d's router | \
`vllm:num_requests_waiting`, `vllm:num_requests_running`, `vllm:kv_cache_usage_perc`, \
`vllm:lora_requests_info` (`running_lora_adapters`, `waiting_lora_adapters`, `max_lora`), \
`vllm:cache_config_info` (`block_size`, `num_gpu_blocks`) | all |
| llm-d's `lora-load-state-scorer` and `lora-residency-filter` | `vllm:lora_adapter_loaded`, \
`vllm:num_gpu_loaded_lora_adapters`, `vllm:max_gpu_lora_adapters`, \
`vllm:lora_adapter_load_seconds` | none: residency counts as unknown, and the adapters of open \
requests as before |
| Router of vLLM's production-stack | `vllm:num_requests_running`, `vllm:num_requests_waiting`, \
`vllm:gpu_cache_usage_perc`, `vllm:gpu_prefix_cache_hits_total`, \
`vllm:gpu_prefix_cache_queries_total`, `vllm:gpu_prefix_cache_hit_rate` | all but the last, which \
vLLM has no longer; it counts as 0 |
| Dashboards for vLLM | the histograms | with our buckets |

A server has as many adapters in a step as sequences, if they fit into the arena. So `max_lora` is
`--max-num-seqs`. llm-d's router takes Pods without the label `llm-d.ai/engine-type` for vLLM.
"""
_TRACES = """
## Traces

The server can write one OpenTelemetry span per request under `/v1`. Install the extra with
`pip install 'loraplex[otel]'`, then set `OTEL_EXPORTER_OTLP_ENDPOINT` (OTLP over HTTP) or
`LORAPLEX_OTEL=1`. `LORAPLEX_OTEL=0` disables spans. `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER` and
the exporter's other variables have their standard meaning. A caller's `traceparent` is the span's
parent. A span never contains prompts or answers.

| attribute | meaning |
|---|---|
| `http.request.method`, `http.route`, `http.response.status_code` | |
| `error.type` | the error's code, also if a stream failed after it began |
| `gen_ai.response.model` | the pinned name, such as `acme/support-bot@3` |
| `gen_ai.usage.input_tokens`, `gen_ai.usage.cache_read.input_tokens`, \
`gen_ai.usage.output_tokens` | tokens metered |
| `gen_ai.response.finish_reasons` | why it ended; `aborted` if the answer is incomplete |
| `loraplex.request_id`, `loraplex.tenant_id` | as in the log and the ledger |
| `loraplex.queue_seconds`, `loraplex.adapter_wait_seconds`, \
`loraplex.time_to_first_token_seconds` | of the first sequence |
"""
_CLOSING = """
This page is generated by `python -m loraplex.api.metrics_reference`.
"""


def metrics_reference() -> str:
    """Every metric with its type, its labels and its help text."""
    sections = "".join(text for section in _sections() for text in _section_text(section))
    return _INTRODUCTION + sections + _TRACES + _CLOSING


def _sections() -> Iterator[_Section]:
    metrics = Metrics(_idle_engine)
    metrics.show_ledger(is_database_away=lambda: False, num_unsettled=lambda: 0)
    metrics.show_disk(free_bytes=lambda: 0, held_bytes=lambda: 0, total_bytes=0)
    collectors: tuple[tuple[str, str, Collector, str], ...] = (
        ("Engine", _OF_THE_ENGINE, EngineCollector(_idle_engine), _BATCHES),
        ("Speculation", _OF_SPECULATION, SpeculationCollector(_idle_engine), _DRAFTS),
        (
            "Adapters in their tiers",
            _OF_TIERS,
            TierCollector(_idle_engine, FetcherStats),
            _COLD_STARTS,
        ),
        ("Utilization", "", UtilizationCollector(_idle_engine), _PEAKS),
        ("Ranks", _OF_RANKS, RankCollector(_idle_engine), ""),
        (
            "Under vLLM's names",
            _UNDER_VLLMS_NAMES,
            VllmCollector(VllmSource("", _idle_engine, EngineSizes, AskedAdapters, metrics.own)),
            _ROUTERS,
        ),
        ("Replicas", _OF_REPLICAS, FleetCollector(lambda: [_idle_replica()]), _LOST_REPLICAS),
    )
    yield _Section("Requests", "", metrics.own, "")
    for title, introduction, collector, closing in collectors:
        yield _Section(title, introduction, collector.collect(), closing)


def _idle_engine() -> EngineStats:
    """A snapshot, so that the collectors have something to show."""
    return EngineStats(
        num_steps=0,
        num_running=0,
        num_waiting=0,
        num_free_kv_blocks=0,
        num_preemptions=0,
        num_prompt_tokens=0,
        num_cached_tokens=0,
        num_generated_tokens=0,
        num_adapter_loads=0,
        num_adapter_evictions=0,
    )


def _idle_replica() -> ReplicaView:
    return ReplicaView(
        id="",
        address="",
        role=ReplicaRole.BOTH,
        state=ReplicaState.READY,
        failure=None,
        num_running=0,
        num_waiting=0,
        max_batch=0,
        num_open=0,
        num_resident=0,
        num_loading=0,
        kv_usage=0.0,
        arena_bytes=0,
        num_restarts=0,
        device="",
        handovers=HandoverFigures(),
    )


def _section_text(section: _Section) -> Iterator[str]:
    yield f"\n## {section.title}\n{section.introduction}\n"
    yield "| metric | type | labels | meaning |\n|---|---|---|---|\n"
    yield from map(_row, section.metrics)
    yield section.closing


def _row(metric: Metric | MetricWrapperBase | LoopHistogram) -> str:
    (family,) = (metric,) if isinstance(metric, Metric) else metric.describe()
    # Neither kind of metric tells its labels otherwise before it has a sample.
    names = (metric if isinstance(metric, MetricWrapperBase) else family)._labelnames  # type: ignore[union-attr]
    labels = ",".join(f" `{label}`" for label in sorted(names))
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return f"| `{name}` | {family.type} |{labels} | {family.documentation} |\n"


if __name__ == "__main__":
    sys.stdout.write(metrics_reference())
