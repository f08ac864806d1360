"""Writes the Grafana dashboard: `python deploy/grafana/dashboard.py`.

The panels are a table here, so that a change of one query is a change of one line. Grafana asks for
the Prometheus when the dashboard is opened: it is a variable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).parent / "dashboards" / "loraplex.json"
COLUMNS = 24
"""Of Grafana's grid."""
PREFIX = "loraplex_"


class Shape(NamedTuple):
    """A kind of panel and its size on the grid."""

    type: str
    width: int
    height: int
    options: dict[str, Any]


CHART = Shape("timeseries", 8, 7, {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}})
NUMBER = Shape("stat", 4, 4, {"graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}})


class Panel(NamedTuple):
    """One chart or number: its lines are queries by legend."""

    title: str
    description: str
    unit: str
    queries: dict[str, str]
    """`$i` stands for the chosen servers, `#` for the metrics' common prefix."""
    shape: Shape = CHART
    alarm: float | None = None
    """A number is red from here on."""


def _quantiles(metric: str) -> dict[str, str]:
    rates = f"sum by (le) (rate(#{metric}_bucket{{$i}}[1m]))"
    return {f"p{int(100 * q)}": f"histogram_quantile({q}, {rates})" for q in (0.5, 0.95, 0.99)}


OVERVIEW = [
    Panel(
        "Servers",
        "Servers that Prometheus reaches.",
        "none",
        {"up": 'sum(up{job="loraplex", $i})'},
        NUMBER,
    ),
    Panel(
        "Requests",
        "Responses per second, whatever their status.",
        "reqps",
        {"requests": "sum(rate(#http_requests_total{$i}[5m]))"},
        NUMBER,
    ),
    Panel(
        "Server errors",
        "Share of responses with a status of 500 or above. LoraplexErrors fires above 2%.",
        "percentunit",
        {
            "errors": '(sum(rate(#http_requests_total{$i, status=~"5.."}[5m])) or vector(0))'
            " / sum(rate(#http_requests_total{$i}[5m]))"
        },
        NUMBER,
        alarm=0.02,
    ),
    Panel(
        "Time to first token, p99",
        "From arrival to the first token. LoraplexSlowFirstToken fires above 10 s.",
        "s",
        {
            "p99": "histogram_quantile(0.99,"
            " sum by (le) (rate(#time_to_first_token_seconds_bucket{$i}[5m])))"
        },
        NUMBER,
        alarm=10,
    ),
    Panel(
        "Waiting sequences",
        "Sequences that wait for KV blocks, their adapter or their grammar.",
        "none",
        {"waiting": "sum(#requests_waiting{$i})"},
        NUMBER,
    ),
    Panel(
        "Output tokens",
        "Metered output tokens per second.",
        "none",
        {"tokens": 'sum(rate(#tokens_total{$i, kind="completion"}[5m]))'},
        NUMBER,
    ),
]

ROWS: dict[str, list[Panel]] = {
    "Overview": OVERVIEW,
    "Requests": [
        Panel(
            "Responses by status",
            "Responses per second, by HTTP status.",
            "reqps",
            {"{{status}}": "sum by (status) (rate(#http_requests_total{$i}[1m]))"},
        ),
        Panel(
            "Time to first token",
            "From arrival to a sequence's first token: queue, adapter load and prefill.",
            "s",
            _quantiles("time_to_first_token_seconds"),
        ),
        Panel(
            "Attained share",
            "Share of the requests that met their service level objective, by who set the targets. "
            "LoraplexSloMissed fires below 90%.",
            "percentunit",
            {
                "{{set_by}}": "1 - (sum by (set_by)"
                ' (rate(#slo_sequences_total{$i, result!="met"}[5m]))'
                " or 0 * sum by (set_by) (rate(#slo_sequences_total{$i}[5m])))"
                " / sum by (set_by) (rate(#slo_sequences_total{$i}[5m]))"
            },
        ),
        Panel(
            "Inter-token latency",
            "Time between a sequence's token events.",
            "s",
            _quantiles("inter_token_latency_seconds"),
        ),
        Panel(
            "Tokens",
            "Metered tokens per second: prompt and completion.",
            "short",
            {"{{kind}}": "sum by (kind) (rate(#tokens_total{$i}[1m]))"},
        ),
        Panel(
            "Tokens by tenant",
            "The ten tenants with the most metered tokens per second.",
            "short",
            {"{{tenant}}": "topk(10, sum by (tenant) (rate(#tokens_total{$i}[1m])))"},
        ),
        Panel(
            "Errors by code",
            "Error responses per second, by code. docs/errors.md describes each.",
            "reqps",
            {"{{code}}": 'sum by (code) (rate(#http_requests_total{$i, code!=""}[1m]))'},
        ),
    ],
    "Engine": [
        Panel(
            "Sequences",
            "Running, waiting, and waiting with their KV cache in host memory.",
            "short",
            {
                "running": "sum(#requests_running{$i})",
                "waiting": "sum(#requests_waiting{$i})",
                "swapped": "sum(#sequences_swapped{$i})",
            },
        ),
        Panel(
            "Queue time",
            "From arrival in the engine to the first step, the adapter wait included.",
            "s",
            _quantiles("queue_seconds"),
        ),
        Panel(
            "Device busy",
            "Share of the time that the engine spends in steps; in a fleet the replicas' mean.",
            "percentunit",
            {"{{instance}}": "avg by (instance) (avg_over_time(#device_busy_ratio{$i}[1m]))"},
        ),
        Panel(
            "Step time",
            "Mean time of a forward pass.",
            "s",
            {
                "mean": "sum(rate(#engine_step_seconds_total{$i}[1m]))"
                " / sum(rate(#engine_steps_total{$i}[1m]))"
            },
        ),
        Panel(
            "KV cache usage, prefix cache hits",
            "Used KV blocks of the fullest pool, and prompt tokens found in the prefix cache.",
            "percentunit",
            {
                "used": "max(#kv_usage_ratio{$i})",
                "hits": "sum(rate(#prefix_cache_hit_tokens_total{$i}[5m]))"
                " / sum(rate(#prefix_cache_query_tokens_total{$i}[5m]))",
            },
        ),
        Panel(
            "Device utilization",
            "Achieved share of peak memory bandwidth and peak compute.",
            "percentunit",
            {
                "bandwidth": "avg(#memory_bandwidth_utilization_ratio{$i})",
                "compute": "avg(#compute_utilization_ratio{$i})",
            },
        ),
        Panel(
            "Speculation acceptance rate",
            "Share of draft tokens that verification accepts, by proposer.",
            "percentunit",
            {
                "{{proposer}}": "sum by (proposer)"
                " (rate(#speculation_accepted_tokens_total{$i}[5m]))"
                " / sum by (proposer) (rate(#speculation_draft_tokens_total{$i}[5m]))"
            },
        ),
    ],
    "Adapters": [
        Panel(
            "Requests by adapter tier",
            "Where a request's adapter was when the request arrived.",
            "reqps",
            {"{{tier}}": "sum by (tier) (rate(#adapter_tier_hits_total{$i}[1m]))"},
        ),
        Panel(
            "Bytes by tier",
            "Bytes of adapters on disk, in host memory and on the device.",
            "bytes",
            {"{{tier}}": "sum by (tier) (#adapter_tier_bytes{$i})"},
        ),
        Panel(
            "Adapter load time, p95 by stage",
            "From the store or disk to the device, by stage.",
            "s",
            {
                "{{stage}}": "histogram_quantile(0.95, sum by (stage, le)"
                " (rate(#adapter_load_seconds_bucket{$i}[5m])))"
            },
        ),
        Panel(
            "Evictions",
            "Adapters that left the device per second, by reason.",
            "ops",
            {"{{reason}}": "sum by (reason) (rate(#adapter_evictions_total{$i}[5m]))"},
        ),
        Panel(
            "Leased and pinned",
            "Device bytes of adapters that cannot be evicted.",
            "bytes",
            {
                "leased": "sum(#adapter_leased_bytes{$i})",
                "pinned": "sum(#adapter_pinned_bytes{$i})",
            },
        ),
        Panel(
            "Adapter load wait",
            "The part of the queue time in which only the adapter was missing.",
            "s",
            _quantiles("adapter_wait_seconds"),
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """What Grafana imports."""
    return {
        "uid": "loraplex",
        "title": "Loraplex",
        "schemaVersion": 41,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "utc",
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                },
                {
                    "name": "instance",
                    "label": "Server",
                    "type": "query",
                    "datasource": _source(),
                    "query": "label_values(loraplex_http_requests_total, instance)",
                    "includeAll": True,
                    "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                    "refresh": 2,
                },
            ]
        },
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    top = number = 0
    for title, panels in ROWS.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "panels": [],
            "gridPos": _at(top, 0, COLUMNS, 1),
        }
        top += 1
        shape = panels[0].shape
        in_line = COLUMNS // shape.width
        for index, panel in enumerate(panels):
            number += 1
            row, column = divmod(index, in_line)
            place = _at(top + row * shape.height, column * shape.width, shape.width, shape.height)
            yield {**_panel(panel), "id": number, "gridPos": place}
        top += -(-len(panels) // in_line) * shape.height


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.alarm is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": panel.alarm}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    return {
        "type": panel.shape.type,
        "title": panel.title,
        "description": panel.description,
        "datasource": _source(),
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": panel.shape.options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _source(),
                "legendFormat": legend,
                "expr": query.replace("#", PREFIX).replace("$i", 'instance=~"$instance"'),
            }
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}


def _at(top: int, left: int, width: int, height: int) -> dict[str, int]:
    return {"y": top, "x": left, "w": width, "h": height}


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
