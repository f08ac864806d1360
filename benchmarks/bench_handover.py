"""What handing a prompt's prefix over costs by each transport, and what roles do to the ITL of
running streams.

    make bench-handover

Two replicas with one thread each, over TLS on this machine. Rounds alternate between three ways to
use them: both compute prompts and decode, the same with a target for the steps that do both (as
`--target-itl` sets it), and one computes the long prompts while the other one decodes. Some clients
stream answers to short prompts, one after the other, while another one sends long prompts. The
target is a multiple of a stream's ITL while nobody sends prompts. Handovers alternate between
shared memory and frames.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from pathlib import Path
from random import Random

from benchmarks.report import parse_options, print_report
from benchmarks.timed_engine import MEASURED_SHAPE, SMOKE_SHAPE, make_model, random_prompt

from loraplex.api.bench.models import BaseShape
from loraplex.api.bench.summary import RequestTiming, percentile
from loraplex.engine.config import EngineConfig
from loraplex.engine.fleet.fleet import Fleet
from loraplex.engine.fleet.handovers import _Handover
from loraplex.engine.messages import (
    GenerationRequest,
    LatencyTargets,
    PrefixTransport,
    ReplicaRole,
    ReplicaState,
    RequestStarted,
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
    target_multiple: float = 2.0
    """The target as a multiple of the ITL of streams alone."""
    num_rounds: int = 3
    num_streams: int = 6
    num_stream_tokens: int = 32
    num_prompts: int = 3
    """Of each arm in a round."""
    num_prompt_tokens: int = 1_000
    pause_seconds: float = 0.2
    """Between an answer and the next prompt."""


SMOKE = Plan(
    SMOKE_SHAPE,
    num_rounds=1,
    num_streams=2,
    num_stream_tokens=8,
    num_prompts=3,
    num_prompt_tokens=520,
    pause_seconds=0.05,
)


@dataclass(frozen=True)
class Arm:
    """One way to use the two replicas."""

    name: str
    roles: Sequence[ReplicaRole]
    target_ms: float | None = None


@dataclass
class Outcome:
    """What the load of one or more rounds gave."""

    streams: list[RequestTiming] = field(default_factory=list)
    prompts: list[RequestTiming] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    """Of the prompts."""
    seconds: float = 0.0

    def itl_ms(self, percent: float) -> float:
        """Of the streams."""
        return percentile(
            [1_000 * gap for each in self.streams for gap in each.itl_seconds], percent
        )

    def as_row(self, name: str) -> dict[str, object]:
        ttft = [1_000 * timing.ttft_seconds for timing in self.prompts]
        num_tokens = sum(timing.output_tokens for timing in self.streams)
        return {
            "replicas": name,
            "stream tokens/s": num_tokens / self.seconds,
            **{f"ITL p{each}, ms": self.itl_ms(each) for each in (50, 95, 99)},
            **{f"prompt TTFT p{each}, ms": percentile(ttft, each) for each in (50, 95)},
        }


@dataclass(frozen=True)
class Handed:
    """The seconds of a complete handover."""

    transport: PrefixTransport
    computed: float
    passed_on: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__ or "", arguments)
    plan = SMOKE if options.is_smoke else Plan()
    model = make_model(options.models, plan.shape)
    alone, rounds, handed = asyncio.run(measure(model, plan))
    total = {arm: merged([each[arm] for each in rounds]) for arm in rounds[0]}
    mixed, target, roles = total
    print_report(
        "handover",
        [outcome.as_row(name) for name, outcome in total.items()],
        ("handovers", [cost_of(handed, each, plan) for each in PrefixTransport]),
        streams=plan.num_streams,
        prompt_tokens=plan.num_prompt_tokens,
        rounds=plan.num_rounds,
        itl_alone_ms=alone,
        roles_p99_over_mixed=ratio(rounds, roles, mixed),
        roles_p99_over_target=ratio(rounds, roles, target),
        target_p99_over_mixed=ratio(rounds, target, mixed),
        requests_answered_differently=sum(
            a != b
            for each in (target, roles)
            for a, b in zip(total[mixed].answers, total[each].answers, strict=True)
        ),
    )
    return 0


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    return Outcome(
        [timing for each in outcomes for timing in each.streams],
        [timing for each in outcomes for timing in each.prompts],
        [answer for each in outcomes for answer in each.answers],
        sum(each.seconds for each in outcomes),
    )


def ratio(rounds: Sequence[dict[str, Outcome]], one: str, other: str) -> float:
    """The median over the rounds of the ratio of the streams' ITL p99: the machine may have been
    busier in some of them."""
    return statistics.median(each[one].itl_ms(99) / each[other].itl_ms(99) for each in rounds)


def cost_of(handed: Sequence[Handed], transport: PrefixTransport, plan: Plan) -> dict[str, object]:
    """Medians over the handovers by this transport. Without any, as on a busy machine, there are no
    figures."""
    scale = 1_000 * 1_000 / plan.num_prompt_tokens
    own = [each for each in handed if each.transport is transport]
    computed = scale * statistics.median(each.computed for each in own) if own else None
    passed_on = scale * statistics.median(each.passed_on for each in own) if own else None
    return {
        "transport": transport.value,
        "handovers": len(own),
        "computed, ms per 1,000 tokens": computed,
        "on its way, ms per 1,000 tokens": passed_on,
        "ratio": passed_on / computed if computed and passed_on is not None else None,
    }


def make_config(model: Path, plan: Plan) -> EngineConfig:
    return EngineConfig(
        str(model),
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_num_seqs=plan.num_streams + 1,
        kv_cache_bytes=256 * MIB,
        arena_bytes=4 * MIB,
        host_cache_bytes=8 * MIB,
        swap_bytes=256 * MIB,
    )


async def measure(model: Path, plan: Plan) -> tuple[float, list[dict[str, Outcome]], list[Handed]]:
    """The median ITL in milliseconds of streams alone, each round's outcomes by arm, and the
    handovers."""
    with tempfile.TemporaryDirectory() as folder:
        small = SmallFleet(Path(folder))
        try:
            for name in ("r0", "r1"):
                await small.add_agent(name, config=make_config(model, plan))
            fleet = small.add_api_server()
            await fleet.start()
            while not all(link.state is ReplicaState.READY for link in fleet.links):
                await asyncio.sleep(0.01)
            mixed, roles = Arm("mixed", BOTH), Arm("roles", ROLES)
            # Both engines learn here what their steps cost, as those that serve have long done.
            await run(fleet, replace(plan, num_prompts=2), mixed, seed=2)
            await run(fleet, replace(plan, num_prompts=2), roles, seed=3)
            alone = (await run(fleet, replace(plan, num_prompts=0), mixed, seed=4)).itl_ms(50)
            target_ms = plan.target_multiple * alone
            target = Arm(f"mixed, target {plan.target_multiple:g} x", BOTH, target_ms)
            handed = noted_handovers(fleet)
            rounds = [
                {arm.name: await run(fleet, plan, arm, seed) for arm in (mixed, target, roles)}
                for seed in range(5, 5 + plan.num_rounds)
            ]
        finally:
            await small.close()
    return alone, rounds, handed


def noted_handovers(fleet: Fleet) -> list[Handed]:
    """The complete handovers from now on, which alternate between the transports."""
    handed: list[Handed] = []
    own = fleet._requests._handovers
    transports = cycle(PrefixTransport)

    def note(handover: _Handover, started: RequestStarted) -> None:
        """In the place of a judgement: a pair that is too slow is measured on."""
        if handover.is_complete and handover.computed_at is not None:
            computed = handover.computed_at - handover.begun_at
            passed_on = max(started.prefix_wait_seconds - computed, 0.0)
            handed.append(Handed(handover.transport, computed, passed_on))

    own._paces.clear()
    own._note_pace = note  # type: ignore[method-assign]
    own._transport = lambda *_: next(transports)  # type: ignore[method-assign]
    return handed


async def run(fleet: Fleet, plan: Plan, arm: Arm, seed: int) -> Outcome:
    """The load of one arm in one round."""
    for link, role in zip(fleet.links, arm.roles, strict=True):
        fleet._router.set_state(link.id, ReplicaState.READY, role)
    return await Load(fleet, plan, arm, seed).run()


class Load:
    """The clients of one run. Those of the same seed ask the same in every arm."""

    def __init__(self, fleet: Fleet, plan: Plan, arm: Arm, seed: int) -> None:
        self._fleet = fleet
        self._plan = plan
        self._arm = arm
        self._seed = seed
        self._outcome = Outcome()
        self._numbers = count()
        self._is_over = False

    async def run(self) -> Outcome:
        """The streams follow each other until the last prompt is answered."""
        began = time.perf_counter()
        streaming = [
            asyncio.create_task(self._stream(each)) for each in range(self._plan.num_streams)
        ]
        await self._send_prompts()
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

    async def _send_prompts(self) -> None:
        rng = Random(self._seed)
        for _ in range(self._plan.num_prompts):
            prompt = random_prompt(rng, self._plan.shape, self._plan.num_prompt_tokens)
            await asyncio.sleep(self._plan.pause_seconds)
            timing, token_ids = await self._ask(prompt, 4)
            self._outcome.prompts.append(timing)
            self._outcome.answers.append(token_ids)

    async def _ask(self, prompt: list[int], num_tokens: int) -> tuple[RequestTiming, list[int]]:
        request = GenerationRequest(
            f"{self._arm.name}-{self._seed}-{next(self._numbers)}",
            "bench",
            prompt,
            SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
            cache_namespace=self._arm.name,  # so that no arm finds what another one has computed
            targets=LatencyTargets.of_ms(None, self._arm.target_ms),
        )
        times: list[float] = []
        token_ids: list[int] = []
        sent = time.perf_counter()
        async for event in self._fleet.submit(request):
            if isinstance(event, TokensGenerated):
                times.append(time.perf_counter())
                token_ids += event.token_ids
        return RequestTiming(sent, tuple(times), len(token_ids)), token_ids


if __name__ == "__main__":
    sys.exit(main())
