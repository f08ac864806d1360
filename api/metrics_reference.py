"""Generates `docs/metrics.md` (`make docs`)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from ..adapters.fetcher_client import FetcherStats
from ..engine.messages import EngineStats
from .telemetry.engine_metrics import EngineCollector, UtilizationCollector
from .telemetry.loop_histogram import LoopHistogram
from .telemetry.metrics import Metrics
from .telemetry.speculation_metrics import SpeculationCollector
from .telemetry.tier_metrics import TierCollector


class _Section(NamedTuple):
    title: str
    introduction: str
    metrics: Iterable[Metric | MetricWrapperBase | LoopHistogram]
    closing: str


_INTRODUCTION = """\
# Metrics and traces

`GET /metrics` answers in Prometheus' text format. It is open to the machine itself, or to who has
`LORAPLEX_METRICS_TOKEN`. Labels are bounded: never an adapter, and of tenants the first 50 since
the start by name, all others as `_other`. Codes are those of [errors.md](errors.md).
"""
_OF_THE_ENGINE = """
From the engine's last snapshot (two a second); absent while it is down, counters from 0 when it
restarts.
"""
_BATCHES = """
How many sequences run at once, how long a step takes, how well the prefix cache hits:

```
rate(loraplex_engine_step_sequences_total[1m]) / rate(loraplex_engine_steps_total[1m])
rate(loraplex_engine_step_seconds_total[1m]) / rate(loraplex_engine_steps_total[1m])
rate(loraplex_prefix_cache_hit_tokens_total[5m])
  / rate(loraplex_prefix_cache_query_tokens_total[5m])
```
"""
_OF_SPECULATION = """
By proposer (`ngram`, `draft`, `early_exit`, `medusa`, `medusa_tree`); of the engine's figures the
same holds as above. Of adapters only their number is told: one version's figures are in
`loraplex adapters why`.
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
Tiers are the store, this machine's disk, host memory and the device. Of the engine's own figures
the same holds as above; those of disk and fetcher are since the server's start.
"""
_COLD_STARTS = """
How often a request finds its adapter on the device, and how long a cold start takes:

```
rate(loraplex_adapter_tier_hits_total{tier="device"}[5m])
  / ignoring(tier) sum(rate(loraplex_adapter_tier_hits_total[5m]))
histogram_quantile(0.95, sum by (stage, le) (rate(loraplex_adapter_load_seconds_bucket[5m])))
```
"""
_PEAKS = """
Both ratios are over the time in which steps ran since the last snapshot, 0 if none did. Counted is
what no implementation avoids: each weight once a step (of experts those that the tokens are
expected to take, of embeddings none), each visible key and value once per sequence, each adapter of
the batch once; two operations per parameter and token, the output head once per sequence.
Attention's own operations and LoRA's are left out. The peak is measured, not the data sheet's: a
small model that fits a cache may exceed it. Over a longer time:

```
rate(loraplex_engine_moved_bytes_total[1m]) / rate(loraplex_engine_step_seconds_total[1m])
  / loraplex_device_peak_bytes_per_second
```
"""
_TRACES = """
## Traces

A span per request under `/v1`, for OpenTelemetry: `pip install 'loraplex[otel]'`, then set
`OTEL_EXPORTER_OTLP_ENDPOINT` (OTLP over HTTP) or `LORAPLEX_OTEL=1`; `LORAPLEX_OTEL=0` keeps it off.
`OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER` and the exporter's other variables mean what they mean
everywhere. A caller's `traceparent` is the span's parent. Prompts and answers are never part of it.

| attribute | meaning |
|---|---|
| `http.request.method`, `http.route`, `http.response.status_code` | |
| `error.type` | the error's code, also of a stream that failed on its way |
| `gen_ai.response.model` | the pinned name, such as `acme/support-bot@3` |
| `gen_ai.usage.input_tokens`, `gen_ai.usage.cache_read.input_tokens`, \
`gen_ai.usage.output_tokens` | tokens metered |
| `gen_ai.response.finish_reasons` | why it ended; `aborted` if the answer is not whole |
| `loraplex.request_id`, `loraplex.tenant_id` | as in the log and the ledger |
| `loraplex.queue_seconds`, `loraplex.adapter_wait_seconds`, \
`loraplex.time_to_first_token_seconds` | of the first sequence |
"""
_CLOSING = """
This page is printed by `python -m loraplex.api.metrics_reference`.
"""


def metrics_reference() -> str:
    """Every metric with its type, its labels and the text that Prometheus gets too."""
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
