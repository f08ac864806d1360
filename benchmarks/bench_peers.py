"""Ours beside vLLM's CPU build and transformers with PEFT: throughput and latency, as ratios.

    make bench-peers [ARGS="--shape 1b --json -"]

All peers serve the same random Llama, written in bf16, and the same adapters, in the dtype that
ours chooses for this machine. Prompts are random tokens that share nothing, outputs greedy and of
fixed length:

- mixed: concurrent requests, in turn to each adapter
- base: the same without adapters
- single, single_adapter: one request at a time, to the base and to one adapter

Throughput is output tokens by the whole wall time. TTFT and ITL are those of mixed, ITL between
pieces of text. In every round each peer is started, warmed up, measured and stopped, the first
peer last in the next round. Every figure is the median of the rounds' figures, and every ratio is
that of two medians.

- ours is `loraplex serve` with its default options. ours_plain decodes without speculation, as the
  others do: random models repeat themselves, which favours prompt lookup.
- vllm_base is vLLM without `--enable-lora`, for the base alone: it compiles only then.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import torch
from benchmarks.bench_loading import SHAPES
from benchmarks.peers import (
    BASE,
    PEERS_PYTHON,
    Ours,
    Peer,
    PeerFailed,
    Running,
    Setup,
    Vllm,
    burnt_core,
)
from benchmarks.peft_peer import Peft
from benchmarks.report import MODELS, Row, machine, table

from loraplex.api.bench import serving, summary
from loraplex.api.bench.load_client import RequestFailed
from loraplex.api.bench.models import BaseShape, text_token_ids
from loraplex.api.bench.summary import Summary, summarize
from loraplex.api.bench.workload import Workload
from loraplex.api.local.installation import StepFailed
from loraplex.api.local.server import LocalServerFailed, leave_on_sigterm
from loraplex.engine.model.base_model import choose_dtype

OURS = ("ours", "ours_plain")
OTHERS = ("vllm", "vllm_base", "peft")
PEERS = (*OURS, *OTHERS)
WORKLOADS = ("mixed", "base", "single", "single_adapter")
LATENCIES = ("ttft_p50_ms", "itl_p99_ms")
PERCENTILES = tuple(f"p{percent}" for percent in summary.PERCENTILES)
NOT_MEASURED = "-"
DTYPES = ("auto", "float32", "bfloat16")
MAX_MODEL_LEN = 2_048
WARMUP_PROMPT_TOKENS, WARMUP_TOKENS = 32, 4
"""Of a warm-up request: steps of every kind, in little time."""

Figures = dict[str, float]
"""A peer's figures by name: tokens per second of each workload, and `LATENCIES`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of each peer in a round."""

    shape: BaseShape
    concurrency: int
    requests: int
    """Of the concurrent workloads."""
    singles: int
    """Requests of the workloads with one at a time."""
    prompt_tokens: int
    output_tokens: int

    def workloads(self, adapters: Sequence[str], number: int) -> dict[str, Workload]:
        """Those that a peer with these adapters can answer, in round `number`."""
        many = {"num_requests": self.requests, "concurrency": self.concurrency}
        one = {"num_requests": self.singles, "concurrency": 1}
        kinds = {
            "mixed": (adapters, many),
            "base": ([BASE], many),
            "single": ([BASE], one),
            "single_adapter": (adapters[:1], one),
        }
        return {
            name: Workload(
                models=models,
                prompt_tokens=self.prompt_tokens,
                output_tokens=self.output_tokens,
                token_ids=text_token_ids(self.shape),
                # The same prompts for every peer, and other ones in each run of a server.
                seed=len(WORKLOADS) * number + index,
                **count,
            )
            for index, (name, (models, count)) in enumerate(kinds.items())
            if models
        }


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    leave_on_sigterm()
    try:
        report, logs = compare(options)
    except (PeerFailed, RequestFailed, LocalServerFailed, StepFailed) as exc:
        print(exc, file=sys.stderr)
        return 1
    # Where JSON goes to standard output, it is alone there.
    output = sys.stderr if options.json == "-" else sys.stdout
    for line in [*table(comparison(report)), "", *table(latencies(report))]:
        print(line, file=output)
    if options.json == "-":
        print(json.dumps(report))
    elif options.json:
        target = Path(options.json)
        target.write_text(json.dumps(report) + "\n")
        for name, log in logs.items():
            target.with_suffix(f".{name}.log").write_text(_without_folders(log, options.models))
    return 0


def _without_folders(log: str, models: Path) -> str:
    """The log without the folders of this machine: it is committed."""
    for folder in (models.absolute(), Path.cwd(), Path(sys.base_prefix), Path(gettempdir())):
        log = log.replace(f"{folder}/", "")
    return log


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="120m")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: as ours chooses")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--requests", type=int, default=16, help="of mixed and base, in a round")
    parser.add_argument("--singles", type=int, default=3, help="of the others, in a round")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--kv-gib", type=int, default=1, help="of either server's KV cache")
    parser.add_argument("--without", nargs="+", choices=PEERS, default=())
    parser.add_argument("--burn", action="store_true", help="another process keeps a core busy")
    parser.add_argument("--serve-options", default="", help="more of `loraplex serve`")
    parser.add_argument("--vllm-python", type=Path, default=PEERS_PYTHON)
    parser.add_argument("--tcmalloc", type=Path, help="libtcmalloc_minimal.so.4, for vLLM")
    parser.add_argument("--models", type=Path, default=MODELS, help="where models are kept")
    parser.add_argument("--json", help="a file, with vLLM's logs beside it; -: standard output")
    options = parser.parse_args(arguments)
    if options.prompt_tokens + options.output_tokens > MAX_MODEL_LEN:
        parser.error(f"a request has at most {MAX_MODEL_LEN} tokens")
    return options


def compare(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """The report, and vLLM's logs by their peer's name."""
    shape = replace(SHAPES[options.shape], max_model_len=MAX_MODEL_LEN)
    plan = Plan(
        shape=shape,
        concurrency=options.concurrency,
        requests=options.requests,
        singles=options.singles,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
    )
    with TemporaryDirectory(prefix="loraplex-peers-") as work:
        setup = make_setup(options, shape, Path(work))
        peers = make_peers(options, setup)
        rounds = list(measured_rounds(peers, plan, options.repeats, is_burnt=options.burn))
        logs = {
            name: setup.log(name).read_text(encoding="utf-8", errors="replace")
            for name in peers
            if name.startswith("vllm")
        }
    return make_report(options, setup, rounds), logs


def make_setup(options: argparse.Namespace, shape: BaseShape, work: Path) -> Setup:
    """The models, made if they are not there yet, and the dtype."""
    folder = options.models.absolute() / f"peers-{options.shape}"
    plan = serving.Plan(num_adapters=options.adapters, rank=options.rank)
    adapters = serving.make_models(folder, shape, plan)
    dtype = choose_dtype(options.dtype, checkpoint=torch.bfloat16, device=torch.device("cpu"))
    return Setup(
        base=folder / "base",
        adapters=adapters,
        rank=options.rank,
        dtype=str(dtype).removeprefix("torch."),
        kv_gib=options.kv_gib,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max(32, options.concurrency),
        work=work,
    )


def make_peers(options: argparse.Namespace, setup: Setup) -> dict[str, Peer]:
    """Those wanted, by their names. Raises `PeerFailed` if a file of theirs is missing."""
    more = shlex.split(options.serve_options)
    vllm = partial(Vllm, setup, python=options.vllm_python, tcmalloc=options.tcmalloc)
    makers: dict[str, Callable[[], Peer]] = {
        "ours": lambda: Ours(setup, "ours", more),
        "ours_plain": lambda: Ours(setup, "ours_plain", [*more, "--speculation", "off"]),
        "vllm": lambda: vllm("vllm", with_adapters=True),
        "vllm_base": lambda: vllm("vllm_base", with_adapters=False),
        "peft": lambda: Peft(setup),
    }
    return {name: make() for name, make in makers.items() if name not in options.without}


def measured_rounds(
    peers: Mapping[str, Peer], plan: Plan, num_rounds: int, *, is_burnt: bool
) -> Iterator[dict[str, dict[str, Summary]]]:
    """Each round's figures, by peer and workload."""
    for number in range(1, num_rounds + 1):
        names = deque(peers)
        names.rotate(-number)
        found = {}
        for name in names:
            with peers[name].running() as peer:
                warm_up(peer, plan)
                with burnt_core(is_burnt):
                    found[name] = measure(peer, plan, number)
            speeds = {kind: each.output_tokens_per_second for kind, each in found[name].items()}
            # A round of a large base takes many minutes.
            print(f"round {number}, {name}: {speeds}", file=sys.stderr, flush=True)
        yield found


def warm_up(peer: Running, plan: Plan) -> None:
    """Short requests of every kind, so that every adapter is loaded and every path was taken."""
    requests = max(plan.concurrency, len(peer.adapters))
    short = replace(
        plan,
        requests=requests,
        singles=1,
        prompt_tokens=min(plan.prompt_tokens, WARMUP_PROMPT_TOKENS),
        output_tokens=min(plan.output_tokens, WARMUP_TOKENS),
    )
    for workload in short.workloads(peer.adapters, 0).values():
        peer.run(workload)


def measure(peer: Running, plan: Plan, number: int) -> dict[str, Summary]:
    """One run of each workload."""
    return {
        name: summarize([peer.run(workload)])
        for name, workload in plan.workloads(peer.adapters, number).items()
    }


def make_report(
    options: argparse.Namespace, setup: Setup, rounds: Sequence[Mapping[str, Mapping[str, Summary]]]
) -> dict[str, Any]:
    """`runs` by peer, `ratios` of ours to the others, and more in `details`."""
    details = {
        peer: {kind: medians([found[peer][kind] for found in rounds]) for kind in kinds}
        for peer, kinds in sorted(rounds[0].items(), key=lambda pair: PEERS.index(pair[0]))
    }
    runs = {peer: flat_figures(kinds) for peer, kinds in details.items()}
    ratios = {
        f"{ours}/{other}": {
            name: runs[ours][name] / runs[other][name] for name in runs[ours] if name in runs[other]
        }
        for ours, other in product(OURS, OTHERS)
        if ours in runs and other in runs
    }
    asked = ("shape", "prompt_tokens", "output_tokens", "concurrency", "requests", "singles")
    more = ("adapters", "rank", "repeats", "kv_gib", "burn", "serve_options")
    return {
        "benchmark": "peers",
        **machine(),
        "dtype": setup.dtype,
        **{name: getattr(options, name) for name in (*asked, *more)},
        "runs": runs,
        "ratios": ratios,
        "details": details,
    }


def medians(summaries: Sequence[Summary]) -> dict[str, Any]:
    """Of one workload's summaries, a round each."""
    speeds = [each.output_tokens_per_second for each in summaries]
    return {
        "tokens_per_second": median(speeds),
        "of_each_round": speeds,
        "ttft_ms": {name: median(each.ttft_ms[name] for each in summaries) for name in PERCENTILES},
        "itl_ms": {name: median(each.itl_ms[name] for each in summaries) for name in PERCENTILES},
    }


def flat_figures(kinds: Mapping[str, Mapping[str, Any]]) -> Figures:
    """A peer's figures from its details."""
    figures = {kind: found["tokens_per_second"] for kind, found in kinds.items()}
    if "mixed" in kinds:
        figures["ttft_p50_ms"] = kinds["mixed"]["ttft_ms"]["p50"]
        figures["itl_p99_ms"] = kinds["mixed"]["itl_ms"]["p99"]
    return figures


def comparison(report: Mapping[str, Any]) -> list[Row]:
    """A row for each figure: every peer's, and the ratios."""
    runs, ratios = report["runs"], report["ratios"]
    return [
        {
            "figure": name if name in LATENCIES else f"{name}, tok/s",
            **{peer: figures.get(name, NOT_MEASURED) for peer, figures in runs.items()},
            **{pair: each.get(name, NOT_MEASURED) for pair, each in ratios.items()},
        }
        for name in (*WORKLOADS, *LATENCIES)
    ]


def latencies(report: Mapping[str, Any]) -> list[Row]:
    """A row for each peer and workload, in milliseconds."""
    return [
        {
            "peer": peer,
            "workload": kind,
            **{f"TTFT {name}": value for name, value in found["ttft_ms"].items()},
            **{f"ITL {name}": value for name, value in found["itl_ms"].items()},
        }
        for peer, kinds in report["details"].items()
        for kind, found in kinds.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
