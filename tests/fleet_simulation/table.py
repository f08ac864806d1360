"""The comparison as a Markdown table: the mean over the seeds, and the least and the most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

Row = Mapping[str, Any]


def table(rows: Sequence[Row]) -> list[str]:
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["num_replicas"], row["load"], row["policy"]].append(row)
    lines = [
        "| replicas | load | policy | on device | p50, s | p99, s | GB loaded | waiting |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (num_replicas, load, policy), of_seeds in groups.items():
        cells = [
            f"{fmean(row['hit_rate'] for row in of_seeds):.3f}",
            f"{fmean(row['ttft_p50_seconds'] for row in of_seeds):.3f}",
            _with_spread([row["ttft_p99_seconds"] for row in of_seeds], digits=2),
            _with_spread([row["gigabytes_loaded"] for row in of_seeds], digits=0),
            _with_spread([row["num_waiting"] for row in of_seeds], digits=0),
        ]
        lines.append(f"| {num_replicas} | {load:.0%} | {policy} | {' | '.join(cells)} |")
    return lines


def _with_spread(values: Sequence[float], *, digits: int) -> str:
    mean = f"{fmean(values):,.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
