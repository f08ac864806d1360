"""Serves divided bases and compares them with one rank and with PEFT; prints one line of JSON.

    make parallel-evidence [ARGS='--only families kills --sample']

`families`: for each model type and number of ranks the largest error of a logit of a mixed batch
against one rank and against PEFT, in fp32, or the reason for which it is refused. `formats`: for
each quantized format and number of ranks the largest error of a logit against one rank, and its
bound, which `tests/support/divided_formats.py` derives; how many tokens are other ones, and how
many of those are near ties, whose two best logits are closer than the bound. `(bytes)`: on a CPU
that multiplies bytes faster than floats; `beyond` counts the sequences whose error is above 0.005,
in which an input has another code of 8 bits.
`traffic`: requests whose tokens differ from those of one rank through preemption, swap, drafts of
every proposer, trees, grammars, several choices, KV policies, prefix hits, eviction and deletion;
`near_ties` are those of them whose two best tokens are closer than a thousandth where they differ,
`events` how often the traffic met what it is for. `kills`: ranks that were killed while requests
ran, at drawn times and at each kind of command (`commands`: how often; 0 if the traffic has none);
a hang is a group that is not down after 10 s, or a request that has not ended when all are silent
for 10 s though the group is back, `uncoded` a request that ended neither whole nor with a code.
`bytes`: what each rank of a larger base planned for its weights, and its peak while it loaded, for
bases that are not quantized, are quantized while they load, and are quantized in their files, and
for one whose ends are most of it (`ends`).
`canaries`: answers with another adapter's marker. Exits with 1 if a figure exceeds its bound.

The ranks of `families`, `traffic` and `canaries` are threads, those of `kills` and `bytes`
processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from benchmarks.rank_processes import rank_processes
from torch._C._distributed_c10d import FileStore

from loraplex.engine.config import EngineConfig, KvDtype, Quantization
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.memory.device_memory import peak_bytes
from loraplex.engine.model.sharded_base import load_sharded_base
from loraplex.engine.process.client import EngineClient
from loraplex.engine.shards.group_links import connect_group
from loraplex.engine.shards.rank_place import GroupShape
from support.canaries import run_canaries
from support.command_kills import HANG_SECONDS, Watched, kill_at, num_hanging, plans
from support.divided import divided_errors
from support.divided_experts import expert_cases
from support.divided_formats import Case, cases, compare
from support.engine import Answer
from support.families import SERVED, STATES, save_family
from support.rank_processes import follower_pids, generate, make_request, serving, until
from support.rank_traffic import Traffic, events, is_same
from support.ranks import followers_as_threads, run_sharded
from support.repeated_base import save_repeated

BOUND = 1e-4
"""Of an error of a logit."""
BYTES_BOUND = 0.005
"""The same for products of bytes, while all inputs have the codes of one rank."""
NEAR_TIE = 1e-3
MAX_BYTES_RATIO = 1.15
SIZES = (2, 4)
SHAPES = (GroupShape(2, 1), GroupShape(4, 1), GroupShape(1, 2), GroupShape(2, 2))
FAMILY_SHAPES = SHAPES[:3]
SAMPLE = ("llama", "qwen3", "phi3-fused", "mixtral", "jetmoe")
SAMPLE_COMMANDS = ("RunChunks",)
SAMPLE_FORMATS = (
    "awq",
    "--quantize int8 (bytes)",
    "--kv-dtype int4",
    "deepseek_v3-lora: deepseek-fp8",
)
NUM_OPEN = 6
"""Requests that run when a rank is killed."""
NUM_TOKENS = 200
"""Of each of them."""
LARGE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 32,
    "initializer_range": 0.02,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""A base of which one layer is a small part."""
WIDE = {**LARGE, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
"""The same for quantized bases, whose parts are smaller: 570 million parameters in 48 layers."""
NUM_WIDE_LAYERS, NUM_SAMPLE_LAYERS = 48, 16
ENDS = {**LARGE, "vocab_size": 64_000}
"""With the layers of `NUM_END_LAYERS`, the ends are two thirds of the base."""
NUM_END_LAYERS = 8
END_SHAPES = (GroupShape(2, 1), GroupShape(1, 2))
NARROW = {**LARGE, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
LOADED_FORMATS = ("int8", "int4", "fp8", "nf4", "mxfp4")
"""Of `--quantize`, whose peak is measured."""
FILE_FORMATS = ("gptq", "gptq-ordered", "awq", "ct-int4", "ct-w8a8", "deepseek-fp8", "nf4")
"""Of checkpoints."""
SAMPLE_FILE_FORMATS = ("ct-w8a8",)


def try_families(folder: Path, is_sample: bool) -> list[dict[str, Any]]:
    rows = []
    for case, (kind, settings) in {**SERVED, **STATES}.items():
        if is_sample and case not in SAMPLE:
            continue
        model = save_family(folder / case / "base", kind, settings)
        for shape in FAMILY_SHAPES:
            work = folder / case / f"{shape.ranks_per_stage}x{shape.num_stages}"
            work.mkdir()
            row = {"type": kind, "case": case, **_sizes(shape)}
            rows.append(row | _try_family(model, shape, work))
    return rows


def _sizes(shape: GroupShape) -> dict[str, int]:
    return {"tp": shape.ranks_per_stage, "pp": shape.num_stages}


def _try_family(model: Path, shape: GroupShape, work: Path) -> dict[str, Any]:
    config = EngineConfig(str(model), device="cpu", dtype="float32")
    size, num_stages = shape
    try:
        run_sharded(config, size, lambda _base, _rank: None, num_stages=num_stages)
    except UnsupportedModel as exc:
        return {"max_error": None, "peft_error": None, "result": f"refused: {exc}"}
    try:
        errors = divided_errors(model, size, work, num_stages=num_stages)
    except ValueError as exc:  # PEFT tunes no linear layer of Zamba2 by the names that all have
        return {"max_error": None, "peft_error": None, "result": f"not compared: {exc}"[:100]}
    result = "ok" if max(errors) < BOUND else "wrong"
    return {"max_error": errors.of_one_rank, "peft_error": errors.of_peft, "result": result}


def try_formats(folder: Path, is_sample: bool) -> list[dict[str, Any]]:
    rows = []
    for name, case in {**cases(), **expert_cases()}.items():
        for size in SIZES[:1] if is_sample else SIZES:
            if is_sample and name not in SAMPLE_FORMATS:
                continue
            work = folder / name / str(size)
            work.mkdir(parents=True)
            rows.append({"name": name, "tp": size, **_try_format(case, size, work)})
    return [*rows, _try_fp8_kv(folder)]


def _try_format(case: Case, size: int, work: Path) -> dict[str, Any]:
    seeds = range(0, 50, 10) if case.multiplies_bytes else (0,)
    found = compare(case, size, work, seeds=seeds)
    row: dict[str, Any] = {
        "max_error": found.max_error,
        "bound": found.bound,
        "tokens": found.tokens,
        "different": found.different,
        "near_ties": found.near_ties,
    }
    if case.multiplies_bytes:
        row["sequences"] = len(found.errors)
        row["beyond"] = sum(error > BYTES_BOUND for error in found.errors)
    return {**row, "result": "ok" if found.is_within else "wrong"}


def _try_fp8_kv(folder: Path) -> dict[str, Any]:
    model = save_family(folder / "fp8", *SERVED["llama"])
    try:
        run_sharded(
            EngineConfig(str(model), device="cpu", kv_dtype=KvDtype.FP8),
            2,
            lambda _base, _rank: None,
        )
    except UnsupportedModel as exc:
        result = f"refused: {exc}"
    else:
        result = "wrong"
    row = {"name": "--kv-dtype fp8", "tp": 2, "max_error": None, "bound": None}
    return {**row, "result": result}


def try_traffic(folder: Path, num_seeds: int, num_waves: int) -> dict[str, Any]:
    traffic, met = Traffic(folder), Counter[str]()
    counts = {"requests": 0, "different": 0, "near_ties": 0}
    for seed in range(num_seeds):
        asked: dict[str, Any] = {"seed": 100 * seed, "num_waves": num_waves}
        asked["has_drafts"] = seed % 2 == 0
        alone = traffic.serve(GroupShape(1, 1), **asked)
        alone.close()
        for shape in SHAPES:
            with followers_as_threads():
                together = traffic.serve(shape, **asked)
                together.close()
            met += Counter(events(together))
            for request_id, answer in alone.answers.items():
                ours = together.answers[request_id]
                counts["requests"] += 1
                if not is_same(answer, ours):
                    counts["different"] += 1
                    counts["near_ties"] += _is_near_tie(answer, ours)
    return {**counts, "events": dict(met)}


def _is_near_tie(answer: Answer, other: Answer) -> bool:
    pairs = zip(answer.token_ids, other.token_ids, strict=False)
    place = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return False
    first, second = answer.logprobs[place].top[:2]
    return first.logprob - second.logprob < NEAR_TIE


def try_kills(folder: Path, is_sample: bool) -> dict[str, Any]:
    """At drawn times, then at each kind of command."""
    model = save_family(folder / "base", *SERVED["llama"])
    counts = asyncio.run(_kill_ranks(model, _shapes(is_sample), 1 if is_sample else 10))
    traffic, met = Traffic(folder / "traffic"), Counter[str]()
    for shape in _shapes(is_sample)[-1:] if is_sample else SHAPES:
        for plan in plans(folder, shape):
            if is_sample and plan.kind not in SAMPLE_COMMANDS:
                continue
            outcome = asyncio.run(kill_at(plan, traffic, shape))
            met[plan.kind] += outcome.happened
            counts["tried"] += outcome.happened
            counts["hangs"] += outcome.num_hanging
            counts["uncoded"] += outcome.num_uncoded
    return {**counts, "commands": dict(met)}


def _shapes(is_sample: bool) -> Sequence[GroupShape]:
    return SHAPES[::3] if is_sample else SHAPES


async def _kill_ranks(model: Path, shapes: Sequence[GroupShape], num_kills: int) -> dict[str, int]:
    rng, counts = random.Random(0), {"tried": 0, "hangs": 0, "uncoded": 0}
    for shape in shapes:
        async with serving(model, shape) as client:
            expected = await generate(client, "before")
            for _ in range(num_kills):
                number = counts["tried"]
                pids = [client.pid, *follower_pids(client)]
                watched = [_watch(client, number, index) for index in range(NUM_OPEN)]
                await asyncio.sleep(rng.uniform(0, 0.3))
                victim = rng.choice(pids)
                assert victim is not None
                os.kill(victim, signal.SIGKILL)
                counts["hangs"] += not await _is_down_in_time(client, pids[0])
                await until(lambda: client.is_ready)
                # What had not started was sent to the new group.
                counts["hangs"] += await num_hanging(client, watched)
                counts["uncoded"] += sum(request.is_uncoded for request in watched)
                assert await generate(client, f"after-{number}") == expected
                counts["tried"] += 1
    return counts


async def _is_down_in_time(client: EngineClient, pid: int | None) -> bool:
    """Whether the death of a rank has ended the group of rank 0's process within the limit."""
    killed_at = time.monotonic()
    await until(lambda: not client.is_ready or client.pid != pid)
    return time.monotonic() - killed_at <= HANG_SECONDS


def _watch(client: EngineClient, number: int, index: int) -> Watched:
    watched = Watched(NUM_TOKENS)
    # A prompt that runs while the engine is killed again and again is put in quarantine.
    prompt = [4 + number, 4 + index]
    client.submit(make_request(f"{number}-{index}", NUM_TOKENS, prompt), watched.take)
    return watched


def measure_bytes(folder: Path, is_sample: bool) -> list[dict[str, Any]]:
    small = save_family(folder / "small", *SERVED["llama"])
    large = save_family(folder / "large", "llama", LARGE)
    rows = []
    for shape in _shapes(is_sample):
        work = folder / f"{shape.ranks_per_stage}x{shape.num_stages}"
        rows += _measure_base(small, large, Quantization.NONE, shape, work)
    pair = GroupShape(2, 1)
    for form in SAMPLE_FILE_FORMATS if is_sample else FILE_FORMATS:
        narrow = save_repeated(folder / f"{form}-narrow", NARROW, 1, form=form)
        num_layers = NUM_SAMPLE_LAYERS if is_sample else NUM_WIDE_LAYERS
        wide = save_repeated(folder / f"{form}-wide", WIDE, num_layers, form=form)
        found = _measure_base(narrow, wide, Quantization.NONE, pair, folder / form)
        rows += [{"format": form, **row} for row in found]
        shutil.rmtree(wide)
    if not is_sample:
        rows += measure_ends(folder / "ends")
        wide = save_repeated(folder / "wide", WIDE, NUM_WIDE_LAYERS)
        for form in LOADED_FORMATS:
            name = f"--quantize {form}"
            found = _measure_base(small, wide, Quantization(form), pair, folder / name)
            rows += [{"format": name, **row} for row in found]
    return rows


def measure_ends(folder: Path) -> list[dict[str, Any]]:
    """The same for a base whose ends are most of it, divided among ranks and among stages."""
    small = save_family(folder / "small", *SERVED["llama"])
    large = save_repeated(folder / "large", ENDS, NUM_END_LAYERS)
    rows = []
    for shape in END_SHAPES:
        work = folder / f"{shape.ranks_per_stage}x{shape.num_stages}"
        rows += _measure_base(small, large, Quantization.NONE, shape, work)
    return [{"base": "ends", **row} for row in rows]


def _measure_base(
    small: Path, large: Path, quantization: Quantization, shape: GroupShape, work: Path
) -> list[dict[str, Any]]:
    """What each rank of `large` planned, and its peak."""
    work.mkdir()
    store = str(work / "store")
    rows = []
    with rank_processes().Pool(shape.size) as pool:
        jobs = [
            pool.apply_async(
                _measure_rank, (str(small), str(large), quantization, store, rank, shape)
            )
            for rank in range(shape.size)
        ]
        for rank, job in enumerate(jobs):
            planned, actual = job.get(600)
            sizes = {"planned": planned, "actual": actual, "ratio": round(actual / planned, 3)}
            rows.append({**_sizes(shape), "rank": rank, **sizes})
    return rows


def _measure_rank(
    small: str, large: str, quantization: Quantization, store: str, rank: int, shape: GroupShape
) -> tuple[int, int]:
    torch.set_num_threads(1)
    links = connect_group(FileStore(store, shape.size), shape, rank, torch.device("cpu"))

    def load(model: str) -> int:
        config = EngineConfig(model, device="cpu", dtype="float32", quantization=quantization)
        return load_sharded_base(config, links).weight_bytes

    load(small)  # what the process keeps of any load is not the base's
    weights: list[int] = []
    peak = peak_bytes(torch.device("cpu"), lambda: weights.append(load(large)))
    if links.stages:
        links.stages.tell_all(b"")  # no process ends before all have received
    return weights[0], peak


def try_canaries(folder: Path, num_requests: int) -> dict[str, int]:
    with followers_as_threads():
        counts = run_canaries(num_requests, 0, directory=folder, num_ranks=2)
    return {"asked": counts["requests"], "foreign": counts["foreign"]}


def problems(found: dict[str, Any]) -> Iterator[str]:
    """The figures that exceed their bounds."""
    for section in ("families", "formats"):
        for row in found.get(section, ()):
            if row["result"] == "wrong":
                yield f"{section}: {row}"
    traffic = found.get("traffic", {})
    if traffic.get("different", 0) > traffic.get("near_ties", 0):
        yield f"traffic: {traffic}"
    kills = found.get("kills", {})
    if kills.get("hangs") or kills.get("uncoded"):
        yield f"kills: {kills}"
    for row in found.get("bytes", ()):
        if row["actual"] > MAX_BYTES_RATIO * row["planned"]:
            yield f"bytes: {row}"
    if found.get("canaries", {}).get("foreign"):
        yield f"canaries: {found['canaries']}"


@contextmanager
def _timed(name: str) -> Iterator[None]:
    begun_at = time.monotonic()
    yield
    print(f"{name}: {time.monotonic() - begun_at:.0f} s", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    sections: dict[str, Callable[[Path, bool], Any]] = {
        "families": try_families,
        "formats": try_formats,
        "traffic": lambda folder, is_sample: try_traffic(
            folder, *((1, 2) if is_sample else (8, 4))
        ),
        "kills": try_kills,
        "bytes": measure_bytes,
        "canaries": lambda folder, is_sample: try_canaries(folder, 200 if is_sample else 20_000),
    }
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--sample", action="store_true", help="a part, for CI")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with redirect_stdout(sys.stderr):
        for name in options.only:
            with TemporaryDirectory() as folder, _timed(name):
                found[name] = sections[name](Path(folder), options.sample)
    print(json.dumps(found))
    wrong = list(problems(found))
    for problem in wrong:
        print(problem, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
