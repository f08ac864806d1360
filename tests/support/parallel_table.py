"""The table of docs/parallel.md: what is divided of each tested model type."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from transformers import CONFIG_MAPPING

from loraplex.engine.shards.shard_plan import read_plan
from support.families import SERVED, STATES

_HEADER = """\
| attention | KV cache | experts | layers with states | model types |
| --- | --- | --- | --- | --- |
"""
_QUERIES = ("q_proj", "query_key_value")
_KEYS = ("k_proj", "query_key_value")


class _Division(NamedTuple):
    """What is divided of a model type."""

    attention: str
    kv_cache: str
    experts: str
    states: str


def parallel_table(cases: Iterable[str]) -> str:
    """One row for all types of which the same is divided. `cases`: of `families`."""
    divisions = {{**SERVED, **STATES}[case][0]: _division(case) for case in cases}
    rows = [
        (division, [f"`{kind}`" for kind in sorted(kinds)])
        for division, kinds in groupby(
            sorted(divisions, key=lambda kind: divisions[kind]), key=lambda kind: divisions[kind]
        )
    ]
    return _HEADER + "".join(
        f"| {' | '.join(division)} | {', '.join(kinds)} |\n" for division, kinds in rows
    )


def _division(case: str) -> _Division:
    config = CONFIG_MAPPING[{**SERVED, **STATES}[case][0]]
    plan = read_plan(config)
    columns = {path.rpartition(".")[2] for path, style in plan.items() if style == "colwise"}
    named = [*plan, *(config.base_model_ep_plan or {})]
    return _Division(
        attention="by heads" if columns.intersection(_QUERIES) else "whole",
        kv_cache="by heads" if columns.intersection(_KEYS) else "whole",
        experts="divided" if any(path.endswith(".experts") for path in named) else "none",
        states="whole" if case in STATES else "none",
    )
