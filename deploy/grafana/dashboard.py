"""Writes the Grafana dashboard: `python deploy/grafana/dashboard.py`.

The panels are a table here, so that a change of one query is a change of one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).parent / "dashboards" / "loraplex.json"
WIDTH, HEIGHT = 8, 7
COLUMNS = 24 // WIDTH
PREFIX = "loraplex_"


class Panel(NamedTuple):
    """One chart: its lines are queries by legend."""

    title: str
    unit: str
    queries: dict[str, str]
    """`$i` stands for the chosen servers, `#` for the metrics' common prefix."""


def _quantiles(metric: str) -> dict[str, str]:
    rates = f"sum by (le) (rate(#{metric}_bucket{{$i}}[1m]))"
    return {f"p{int(100 * q)}": f"histogram_quantile({q}, {rates})" for q in (0.5, 0.95, 0.99)}


ROWS: dict[str, list[Panel]] = {
    "Requests": [
        Panel(
            "Responses by status",
            "reqps",
            {"{{status}}": "sum by (status) (rate(#http_requests_total{$i}[1m]))"},
        ),
        Panel("Time to first token", "s", _quantiles("time_to_first_token_seconds")),
        Panel("Inter-token latency", "s", _quantiles("inter_token_latency_seconds")),
        Panel(
            "Tokens",
            "short",
            {"{{kind}}": "sum by (kind) (rate(#tokens_total{$i}[1m]))"},
        ),
        Panel(
            "Tokens by tenant",
            "short",
            {"{{tenant}}": "topk(10, sum by (tenant) (rate(#tokens_total{$i}[1m])))"},
        ),
        Panel(
            "Errors by code",
            "reqps",
            {"{{code}}": 'sum by (code) (rate(#http_requests_total{$i, code!=""}[1m]))'},
        ),
    ],
    "Engine": [
        Panel(
            "Sequences",
            "short",
            {
                "running": "sum(#requests_running{$i})",
                "waiting": "sum(#requests_waiting{$i})",
                "swapped": "sum(#sequences_swapped{$i})",
            },
        ),
        Panel("Queue time", "s", _quantiles("queue_seconds")),
        Panel(
            "Step time",
            "s",
            {
                "mean": "sum(rate(#engine_step_seconds_total{$i}[1m]))"
                " / sum(rate(#engine_steps_total{$i}[1m]))"
            },
        ),
        Panel(
            "KV cache usage, prefix cache hits",
            "percentunit",
            {
                "used": "max(#kv_usage_ratio{$i})",
                "hits": "sum(rate(#prefix_cache_hit_tokens_total{$i}[5m]))"
                " / sum(rate(#prefix_cache_query_tokens_total{$i}[5m]))",
            },
        ),
        Panel(
            "Device utilization",
            "percentunit",
            {
                "bandwidth": "avg(#memory_bandwidth_utilization_ratio{$i})",
                "compute": "avg(#compute_utilization_ratio{$i})",
            },
        ),
        Panel(
            "Speculation acceptance rate",
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
            "reqps",
            {"{{tier}}": "sum by (tier) (rate(#adapter_tier_hits_total{$i}[1m]))"},
        ),
        Panel(
            "Bytes by tier",
            "bytes",
            {"{{tier}}": "sum by (tier) (#adapter_tier_bytes{$i})"},
        ),
        Panel(
            "Adapter load time, p95 by stage",
            "s",
            {
                "{{stage}}": "histogram_quantile(0.95, sum by (stage, le)"
                " (rate(#adapter_load_seconds_bucket{$i}[5m])))"
            },
        ),
        Panel(
            "Evictions",
            "ops",
            {"{{reason}}": "sum by (reason) (rate(#adapter_evictions_total{$i}[5m]))"},
        ),
        Panel(
            "Leased and pinned",
            "bytes",
            {
                "leased": "sum(#adapter_leased_bytes{$i})",
                "pinned": "sum(#adapter_pinned_bytes{$i})",
            },
        ),
        Panel("Adapter load wait", "s", _quantiles("adapter_wait_seconds")),
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
                    "name": "instance",
                    "label": "Server",
                    "type": "query",
                    "datasource": _source(),
                    "query": "label_values(loraplex_http_requests_total, instance)",
                    "includeAll": True,
                    "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                    "refresh": 2,
                }
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
            "gridPos": _at(top, 0, 24, 1),
        }
        top += 1
        for index, panel in enumerate(panels):
            number += 1
            row, column = divmod(index, COLUMNS)
            place = _at(top + row * HEIGHT, column * WIDTH, WIDTH, HEIGHT)
            yield {**_chart(panel), "id": number, "gridPos": place}
        top += -(-len(panels) // COLUMNS) * HEIGHT


def _chart(panel: Panel) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": _source(),
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}},
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
    return {"type": "prometheus", "uid": "prometheus"}


def _at(top: int, left: int, width: int, height: int) -> dict[str, int]:
    return {"y": top, "x": left, "w": width, "h": height}


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
