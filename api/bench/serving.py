"""The serving benchmark: mixed adapters and the base alone, on one server, in alternating runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from ..local.installation import Installation, StepFailed, TenantAccess
from .load_client import run_workload
from .models import BaseShape, make_adapter, make_base, text_token_ids
from .summary import Run, Summary, summarize
from .workload import Workload

WARMUP_SEED = 1
"""Runs use the following seeds, so that no two share a prompt."""


@dataclass(frozen=True)
class Plan:
    """The parameters of a measurement; the defaults are those of the published figures."""

    concurrency: int = 16
    num_requests: int = 48
    """Per run."""
    prompt_tokens: int = 128
    output_tokens: int = 64
    num_adapters: int = 8
    rank: int = 16
    repeats: int = 3

    @property
    def num_sent(self) -> int:
        """All requests, the warm-up's among them."""
        return 2 * (self.repeats * self.num_requests + self.num_warmup)

    @property
    def num_warmup(self) -> int:
        """Enough to have every adapter loaded and every batch size seen."""
        return max(self.concurrency, self.num_adapters)


@dataclass(frozen=True, slots=True)
class ServedBase:
    """The base as its server describes it."""

    name: str
    dtype: str
    quantization: str


@dataclass(frozen=True, slots=True)
class Target:
    """The target of the load."""

    base_url: str
    """Ends in `/v1`."""
    api_key: str
    base: ServedBase
    adapters: Sequence[str]


@dataclass(frozen=True, slots=True)
class Report:
    """The mix and the base alone, by the same client against the same server."""

    plan: Plan
    served: ServedBase
    mixed: Summary
    base_only: Summary

    @property
    def ratio(self) -> float:
        """Mixed throughput as a share of the base's."""
        return self.mixed.output_tokens_per_second / self.base_only.output_tokens_per_second

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def make_models(folder: Path, shape: BaseShape, plan: Plan) -> list[Path]:
    """Write the base to `folder/base` and return the adapters' folders; existing ones are kept."""
    make_base(folder / "base", shape)
    paths = [folder / f"adapter-r{plan.rank}-{index}" for index in range(plan.num_adapters)]
    for index, path in enumerate(paths):
        make_adapter(path, shape, rank=plan.rank, seed=index)
    return paths


def served_base(url: str, tenant: TenantAccess) -> ServedBase:
    """The base of the server at `url`. Raises `StepFailed` if it does not report one."""
    headers = {"Authorization": f"Bearer {tenant.api_key}"}
    try:
        response = httpx.get(f"{url}/v1/base", headers=headers).raise_for_status()
    except httpx.HTTPError as exc:
        raise StepFailed(f"{url}: {exc}") from exc
    base = response.json()
    return ServedBase(name=base["id"], dtype=base["dtype"], quantization=base["quantization"])


def push_adapters(
    installation: Installation, tenant: TenantAccess, folders: Sequence[Path]
) -> list[str]:
    """Push them all; returns the names to call them by."""
    return [installation.push(tenant, folder, folder.name) for folder in folders]


def measure(
    plan: Plan, target: Target, shape: BaseShape, *, on_finished: Callable[[], None]
) -> Report:
    """Warm up, then alternate runs of the mix and of the base alone, so that a drift affects
    both."""

    def run(models: Sequence[str], num_requests: int, seed: int) -> Run:
        workload = Workload(
            models=models,
            num_requests=num_requests,
            concurrency=plan.concurrency,
            prompt_tokens=plan.prompt_tokens,
            output_tokens=plan.output_tokens,
            token_ids=text_token_ids(shape),
            seed=seed,
        )
        return asyncio.run(
            run_workload(
                workload,
                base_url=target.base_url,
                api_key=target.api_key,
                on_finished=on_finished,
            )
        )

    base_only = [target.base.name]
    run(target.adapters, plan.num_warmup, WARMUP_SEED)
    run(base_only, plan.num_warmup, WARMUP_SEED + 1)
    mixed: list[Run] = []
    base: list[Run] = []
    for seed in range(WARMUP_SEED + 2, WARMUP_SEED + 2 + 2 * plan.repeats, 2):
        mixed.append(run(target.adapters, plan.num_requests, seed))
        base.append(run(base_only, plan.num_requests, seed + 1))
    return Report(plan=plan, served=target.base, mixed=summarize(mixed), base_only=summarize(base))
