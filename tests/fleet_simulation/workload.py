"""The requests: Zipf 1 popularity that shifts, lengths, groups, and prefixes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from math import log
from random import Random

from loraplex.engine.fleet.router import RoutedRequest

from . import scenario as costs
from .scenario import Scenario


@dataclass(slots=True)
class SimulatedRequest:
    """A request and what became of it."""

    routed: RoutedRequest
    router: int
    arrived_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix: int
    first_token_at: float | None = None
    num_prompt_left: int = 0


class Workload:
    """The same seed gives every policy the same requests."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._random = Random(scenario.seed)
        self._names = [f"a{number:05}" for number in range(scenario.num_adapters)]
        self._random.shuffle(self._names)
        self._weights = list(accumulate(1 / rank for rank in range(1, scenario.num_adapters + 1)))
        ranks, shares = zip(*costs.RANK_SHARES.items(), strict=True)
        drawn = self._random.choices(ranks, shares, k=scenario.num_adapters)
        self.bytes_of = {
            name: rank * costs.RANK_BYTES for name, rank in zip(self._names, drawn, strict=True)
        }
        self._num_requests = 0

    def traffic(self) -> dict[str, float]:
        """Each adapter's requests/s now, the most popular one first."""
        scale = self._scenario.requests_per_second / self._weights[-1]
        return {name: scale / rank for rank, name in enumerate(self._names, start=1)}

    def shift(self) -> None:
        """A popular adapter and a random one exchange their popularity."""
        popular = self._random.randrange(50)
        other = self._random.randrange(len(self._names))
        names = self._names
        names[popular], names[other] = names[other], names[popular]

    def seconds_to_next(self) -> float:
        per_arrival = 1 + costs.GROUP_SHARE * (costs.GROUP_SIZE - 1)
        return self._random.expovariate(self._scenario.requests_per_second / per_arrival)

    def arrival(self, now: float) -> list[SimulatedRequest]:
        """One request, or the answers of one with `n > 1`."""
        random = self._random
        router = random.randrange(self._scenario.num_routers)
        adapter = self._adapter()
        prefix = random.randrange(costs.PREFIXES_PER_ADAPTER)
        num_prompt = self._length(costs.MEAN_PROMPT_TOKENS, costs.PREFIX_TOKENS + 16)
        size = costs.GROUP_SIZE if random.random() < costs.GROUP_SHARE else 1
        group = f"g{self._num_requests}" if size > 1 else None
        hashes = (f"{adapter}/{prefix}".encode(),) if adapter else ()
        requests = []
        for _ in range(size):
            self._num_requests += 1
            routed = RoutedRequest(f"q{self._num_requests}", adapter, group, hashes)
            num_output = self._length(costs.MEAN_OUTPUT_TOKENS, 1)
            requests.append(SimulatedRequest(routed, router, now, num_prompt, num_output, prefix))
        return requests

    def _adapter(self) -> str | None:
        if self._random.random() < costs.BASE_SHARE:
            return None
        return self._names[bisect_left(self._weights, self._random.random() * self._weights[-1])]

    def _length(self, mean: int, least: int) -> int:
        middle = log(mean) - costs.SPREAD**2 / 2
        return min(max(least, int(self._random.lognormvariate(middle, costs.SPREAD))), 8000)
