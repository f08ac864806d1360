"""What handing a prompt's prefix over costs, and what roles do to the ITL of running streams.

    make bench-handover

Two replicas with one thread each, over TLS on this machine: once both compute prompts and decode,
with and without a target for the steps that do both (`--target-itl`), once one computes the long
prompts and the other one decodes. Some clients stream answers to short prompts, one after the
other, while others send long prompts. The target is a multiple of a stream's ITL while nobody sends
prompts.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

from benchmarks.report import parse_options, print_report
from benchmarks.timed_engine import MEASURED_SHAPE, SMOKE_SHAPE, make_model, random_prompt

from loraplex.api.bench.models import BaseShape
from loraplex.api.bench.summary import RequestTiming, percentile
from loraplex.engine.config import EngineConfig
from loraplex.engine.fleet.fleet import Fleet
from loraplex.engine.fleet.handover_pace import HandoverPace
from loraplex.engine.messages import (
    GenerationRequest,
    ReplicaRole,
    ReplicaState,
    TokensGenerated,
)
from loraplex.engine.sampling_params import SamplingParams
from support.small_fleet import SmallFleet

MIB = 1 << 20
BOTH = (ReplicaRole.BOTH, ReplicaRole.BOTH)
ROLES = (ReplicaRole.PREFILL, ReplicaRole.DECODE)


@dataclass(frozen=True)
class Plan:
    shape: BaseShape = MEASURED_SHAPE
    multiples: tuple[float, ...] = (2.0,)
    """Targets as multiples of the ITL of streams alone."""
    num_streams: int = 6
    num_stream_tokens: int = 32
    num_prompt_clients: int = 1
    num_prompts: int = 10
    num_prompt_tokens: int = 1_000
    pause_seconds: float = 0.2
    """Between an answer and the client's next prompt."""


SMOKE = Plan(
    SMOKE_SHAPE,
    multiples=(2.0,),
    num_streams=2,
    num_stream_tokens=8,
    num_prompts=3,
    num_prompt_tokens=520,
    pause_seconds=0.05,
)


@dataclass
class Outcome:
    """One arm's run."""

    name: str
    streams: list[RequestTiming] = field(default_factory=list)
    prompts: list[RequestTiming] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    """Of the prompts."""
    handovers: list[tuple[float, float]] = field(default_factory=list)
    """For each the seconds of its computation, and those on its way."""
    seconds: float = 0.0
    itl_alone_ms: float = 0.0
    """The median while nobody sends prompts."""

    def as_row(self) -> dict[str, object]:
        itl = gaps_ms(self.streams)
        ttft = [1_000 * timing.ttft_seconds for timing in self.prompts]
        num_tokens = sum(timing.output_tokens for timing in self.streams)
        return {
            "replicas": self.name,
            "stream tokens/s": num_tokens / self.seconds,
            **{f"ITL p{each}, ms": percentile(itl, each) for each in (50, 95, 99)},
            **{f"prompt TTFT p{each}, ms": percentile(ttft, each) for each in (50, 95)},
            "handovers": len(self.handovers),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__ or "", arguments)
    plan = SMOKE if options.is_smoke else Plan()
    model = make_model(options.models, plan.shape)
    mixed = [asyncio.run(run_arm(model, plan, "mixed", BOTH, None))]
    itl_ms = mixed[0].itl_alone_ms
    for multiple in plan.multiples:
        name = f"mixed, target {multiple:g} x"
        mixed.append(asyncio.run(run_arm(model, plan, name, BOTH, multiple * itl_ms)))
    roles = asyncio.run(run_arm(model, plan, "roles", ROLES, None))
    p99 = [percentile(gaps_ms(each.streams), 99) for each in mixed]
    print_report(
        "handover",
        [each.as_row() for each in (*mixed, roles)],
        streams=plan.num_streams,
        prompt_tokens=plan.num_prompt_tokens,
        itl_alone_ms=itl_ms,
        roles_p99_over_mixed=percentile(gaps_ms(roles.streams), 99) / p99[0],
        roles_p99_over_best_target=percentile(gaps_ms(roles.streams), 99) / min(p99[1:]),
        **cost_of(roles, plan),
        requests_answered_differently=sum(
            a != b
            for each in (*mixed[1:], roles)
            for a, b in zip(mixed[0].answers, each.answers, strict=True)
        ),
    )
    return 0


def cost_of(roles: Outcome, plan: Plan) -> dict[str, object]:
    """Medians over the handovers of a run."""
    scale = 1_000 * 1_000 / plan.num_prompt_tokens
    computed, passed_on = (
        scale * statistics.median(seconds) for seconds in zip(*roles.handovers, strict=True)
    )
    return {
        "computed_ms_per_1000_tokens": computed,
        "handed_over_ms_per_1000_tokens": passed_on,
        "handed_over_to_computed": passed_on / computed,
    }


def gaps_ms(timings: Sequence[RequestTiming]) -> list[float]:
    return [1_000 * gap for timing in timings for gap in timing.itl_seconds]


def make_config(model: Path, plan: Plan, target_ms: float | None) -> EngineConfig:
    return EngineConfig(
        str(model),
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_num_seqs=plan.num_streams + plan.num_prompt_clients,
        kv_cache_bytes=256 * MIB,
        arena_bytes=4 * MIB,
        host_cache_bytes=8 * MIB,
        swap_bytes=256 * MIB,
        target_itl_ms=target_ms,
    )


async def run_arm(
    model: Path, plan: Plan, name: str, roles: Sequence[ReplicaRole], target_ms: float | None
) -> Outcome:
    config = make_config(model, plan, target_ms)
    with tempfile.TemporaryDirectory() as folder:
        small = SmallFleet(Path(folder))
        try:
            for index, role in enumerate(roles):
                await small.add_agent(f"r{index}", role, config)
            fleet = small.add_api_server()
            await fleet.start()
            while not all(link.state is ReplicaState.READY for link in fleet.links):
                await asyncio.sleep(0.01)
            # Both engines learn here what their steps cost, as those that serve have long done.
            await Load(fleet, replace(plan, num_prompts=2), 2, name).run()
            alone = await Load(fleet, replace(plan, num_prompts=0), 3, name).run()
            handovers: list[tuple[float, float]] = []
            paces = fleet._requests._handovers._paces
            paces.clear()
            paces.default_factory = partial(NotedPace, handovers)
            outcome = await Load(fleet, plan, 1, name).run()
            outcome.handovers = handovers
            outcome.itl_alone_ms = percentile(gaps_ms(alone.streams), 50)
        finally:
            await small.close()
    return outcome


class NotedPace(HandoverPace):
    """Also notes the seconds of each handover that is complete."""

    def __init__(self, handovers: list[tuple[float, float]]) -> None:
        super().__init__(time.monotonic)
        self._handovers = handovers

    def note(self, num_tokens: int, *, computed: float, passed_on: float) -> None:
        super().note(num_tokens, computed=computed, passed_on=passed_on)
        self._handovers.append((computed, passed_on))


class Load:
    """The clients of one run."""

    def __init__(self, fleet: Fleet, plan: Plan, seed: int, name: str) -> None:
        self._fleet = fleet
        self._plan = plan
        self._seed = seed
        self._outcome = Outcome(name)
        rng = Random(seed)
        self._prompts = [
            random_prompt(rng, plan.shape, plan.num_prompt_tokens) for _ in range(plan.num_prompts)
        ]
        self._numbers = count()
        self._is_over = False

    async def run(self) -> Outcome:
        """The streams follow each other until the last prompt is answered."""
        began = time.perf_counter()
        streaming = [
            asyncio.create_task(self._stream(each)) for each in range(self._plan.num_streams)
        ]
        num_clients = self._plan.num_prompt_clients
        await asyncio.gather(*(self._send_prompts(each) for each in range(num_clients)))
        self._is_over = True
        await asyncio.gather(*streaming)
        self._outcome.seconds = time.perf_counter() - began
        return self._outcome

    async def _stream(self, number: int) -> None:
        rng = Random(100 * self._seed + number)
        while True:
            prompt = random_prompt(rng, self._plan.shape, 32)
            timing, _ = await self._ask(prompt, self._plan.num_stream_tokens)
            self._outcome.streams.append(timing)
            if self._is_over:
                return

    async def _send_prompts(self, number: int) -> None:
        for prompt in self._prompts[number :: self._plan.num_prompt_clients]:
            await asyncio.sleep(self._plan.pause_seconds)
            timing, token_ids = await self._ask(prompt, 4)
            self._outcome.prompts.append(timing)
            self._outcome.answers.append(token_ids)

    async def _ask(self, prompt: list[int], num_tokens: int) -> tuple[RequestTiming, list[int]]:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        request_id = f"{self._seed}-{next(self._numbers)}"
        times: list[float] = []
        token_ids: list[int] = []
        sent = time.perf_counter()
        stream = self._fleet.submit(GenerationRequest(request_id, "bench", prompt, sampling))
        async for event in stream:
            if isinstance(event, TokensGenerated):
                times.append(time.perf_counter())
                token_ids += event.token_ids
        return RequestTiming(sent, tuple(times), len(token_ids)), token_ids


if __name__ == "__main__":
    sys.exit(main())
