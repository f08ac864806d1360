"""From which size on a sum over ranks is faster in parts than gathered whole.

    make bench-rank-sums

Both add in the order of the ranks and give the same bits. Each rank is a process with one thread,
and gloo connects them. The median of several sums counts.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from benchmarks.rank_processes import rank_processes
from benchmarks.report import parse_options, print_report
from torch import Tensor

from loraplex.engine.shards.rank_place import RankPlace
from loraplex.engine.shards.rank_sums import TWO_SHOT_BYTES, connect_ranks

KIB = 1 << 10


@dataclass(frozen=True)
class Plan:
    sizes: tuple[int, ...] = (3, 4, 8)
    kib: tuple[int, ...] = (16, 64, 256, 512, 1024, 2048, 4096)
    num_repeats: int = 9


SMOKE = Plan(sizes=(3,), kib=(1, 2), num_repeats=1)


@dataclass(frozen=True)
class Measured:
    """Seconds by size of the message, in the plan's order."""

    gathered: list[float]
    in_parts: list[float]
    num_different: int
    """Messages whose sums have other bits."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__ or "", arguments)
    plan = SMOKE if options.is_smoke else Plan()
    rows, num_different = [], 0
    for size in plan.sizes:
        found = _measure(plan, size)
        num_different += found.num_different
        for kib, whole, parts in zip(plan.kib, found.gathered, found.in_parts, strict=True):
            rows.append(
                {
                    "ranks": size,
                    "KiB": kib,
                    "gathered ms": 1000 * whole,
                    "in parts ms": 1000 * parts,
                    "times as fast": whole / parts,
                }
            )
    print_report(
        "rank-sums",
        rows,
        in_parts_from_kib=TWO_SHOT_BYTES // KIB,
        requests_answered_differently=num_different,
    )
    return 0


def _measure(plan: Plan, size: int) -> Measured:
    with tempfile.TemporaryDirectory() as folder, rank_processes().Pool(size) as pool:
        jobs = [
            pool.apply_async(_measure_rank, (str(Path(folder) / "store"), rank, size, plan))
            for rank in range(size)
        ]
        measured: list[Measured] = [job.get(600) for job in jobs]
    return measured[0]


def _measure_rank(store: str, rank: int, size: int, plan: Plan) -> Measured:
    from torch._C._distributed_c10d import FileStore  # not every PyTorch has it

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    ranks = connect_ranks(FileStore(store, size), RankPlace(rank, size), cpu)

    def seconds(add: Callable[[Tensor], Tensor], part: Tensor) -> float:
        times = []
        for _ in range(plan.num_repeats):
            ranks.gather(torch.zeros(1))  # all begin together
            begun_at = time.perf_counter()
            add(part)
            times.append(time.perf_counter() - begun_at)
        return median(times)

    gathered: list[float] = []
    in_parts: list[float] = []
    num_different = 0
    for kib in plan.kib:
        part = torch.randn(kib * KIB // 4)
        num_different += not torch.equal(ranks.add_gathered(part), ranks.add_in_parts(part))
        gathered.append(seconds(ranks.add_gathered, part))
        in_parts.append(seconds(ranks.add_in_parts, part))
    return Measured(gathered, in_parts, num_different)


if __name__ == "__main__":
    sys.exit(main())
