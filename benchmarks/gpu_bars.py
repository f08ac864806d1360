"""The bars for the speed of an 8 B base on an H100 or H200, beside what `gpu_check` measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.bench_mixed_step import DISTINCT

BANDWIDTH_SHARES = {"mixed_step": 0.75, "mixed_step_int8": 0.60, "mixed_step_int4": 0.50}
"""By part of the check: least share of the measured copy bandwidth that a decode step of the base
reaches."""
MAX_OVER_BYTES = 1.08
"""Of a step with adapters over one of the base, over the ratio of their bytes."""
MAX_DORA_RATIO = 1.10
"""Of a step with one adapter of DoRA and lm_head over one of plain adapters."""
CHUNK_TOKENS = 1_024
MAX_OVER_FLOOR = 1.30
"""Of a prompt chunk over its products alone."""
MAX_ADAPTER_RATIO = 1.10
"""Of a prompt chunk with an adapter over one of the base."""
MAX_OVER_DENSE = 1.15
"""Of a prompt's attention over PyTorch's dense one."""
MIN_TWO_RANKS = 1.6
"""Of a decode step on one rank over that on two, joined by NVLink."""
MAX_IDLE = 0.03
"""Of a decode step in which the device waits for the host."""


class Bar(NamedTuple):
    """A figure and its bar."""

    point: str
    value: float
    bar: float
    is_least: bool = False
    """The bar is the least allowed value, not the greatest."""

    def as_row(self) -> dict[str, Any]:
        holds = self.value >= self.bar if self.is_least else self.value <= self.bar
        sign = ">=" if self.is_least else "<="
        return {
            "point": self.point,
            "value": round(self.value, 3),
            "bar": f"{sign} {self.bar}",
            "holds": holds,
        }


def bars(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of every part that was measured; `result`: what `gpu_check` prints."""
    return [bar.as_row() for bar in _bars(result)]


def _bars(result: Mapping[str, Any]) -> Iterator[Bar]:
    for part, least in BANDWIDTH_SHARES.items():
        for row in _replayed(result, part):
            if row["adapters"] == "base":
                point = f"{part}: share of bandwidth, {row['batch']} sequences"
                yield Bar(point, row["of bandwidth"], least, is_least=True)
    for row in _replayed(result, "mixed_step"):
        if row["adapters"] in ("one adapter", DISTINCT):
            point = f"{row['adapters']} over its bytes, {row['batch']} sequences"
            yield Bar(point, row["over bytes"], MAX_OVER_BYTES)
    if "mixed_step" in result:
        ratio = result["mixed_step"]["dora_over_all_distinct"]["graphs"]
        yield Bar("one adapter with DoRA and lm_head", ratio, MAX_DORA_RATIO)
    for row in result.get("prompts", {}).get("rows", ()):
        if (row["prompts"], row["tokens each"]) != (1, CHUNK_TOKENS):
            continue
        if row["adapters"] == "base":
            yield Bar("prompt chunk over its products", row["over floor"], MAX_OVER_FLOOR)
        elif row["adapters"] == "one adapter":
            yield Bar("prompt chunk with an adapter", row["ratio"], MAX_ADAPTER_RATIO)
    for row in result.get("attention_times", {}).get("prefill", ()):
        if row["dense_microseconds"] is not None:
            point = f"prompt attention over PyTorch's, {row['new_tokens']} tokens"
            yield Bar(point, row["microseconds"] / row["dense_microseconds"], MAX_OVER_DENSE)
    for row in result.get("idle", {}).get("rows", ()):
        if row["async"]:
            yield Bar(f"idle device, {row['sequences']} sequences", row["idle"], MAX_IDLE)
    for row in result.get("rank_times", {}).get("rows", ()):
        point = f"two ranks over one, {row['batch']} sequences"
        yield Bar(point, row["times_as_fast"], MIN_TWO_RANKS, is_least=True)


def _replayed(result: Mapping[str, Any], part: str) -> Iterable[Mapping[str, Any]]:
    """The rows of steps that run as graphs."""
    rows = result.get(part, {}).get("rows", ())
    return (row for row in rows if row["mode"] == "graphs")
