"""The sizes, the costs and the load of a simulated fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# An 8 B base on an H100, in seconds: benchmarks/results/README.md, "Decoding" and "Prompts".
STEP_SECONDS = 8.5e-3
ROW_SECONDS = 7.5e-5
ADAPTER_SECONDS = 5.5e-5
PROMPT_TOKEN_SECONDS = 3.66e-5
TOKEN_BUDGET = 1024
MAX_BATCH = 64
ARENA_BYTES = 14e9
LOAD_BYTES_PER_SECOND = 150e6
"""`loader_duty` 0.1 of what a core reads."""
RANK_BYTES = 5.25e6
RANK_SHARES: Mapping[int, float] = {8: 0.25, 16: 0.5, 32: 0.15, 64: 0.1}
MEAN_PROMPT_TOKENS = 512
MEAN_OUTPUT_TOKENS = 128
SPREAD = 0.8
"""Of the logarithm of a length."""
PREFIX_TOKENS = 200
PREFIXES_PER_ADAPTER = 3
BASE_SHARE = 0.03
"""Requests without an adapter."""
GROUP_SHARE = 0.01
GROUP_SIZE = 4
STATS_SECONDS = 0.5
PUSH_SECONDS = 0.02
"""From the end of an engine until the routers know it; until then the replica refuses at once."""
RESTART_SECONDS = 10.0
"""Until a restarted replica has filled its arena and is ready again."""
SHIFT_SECONDS = 5.0
"""Between two changes of popularity."""
TYPICAL_ADAPTERS_IN_BATCH = 32


@dataclass(frozen=True, slots=True)
class Scenario:
    """Times are in seconds from the start."""

    seed: int
    num_replicas: int
    num_adapters: int
    load: float
    """Relative to the fleet's capacity."""
    warm_seconds: float
    """Requests of this time are not measured."""
    measured_seconds: float
    num_routers: int = 8
    restarts: Mapping[float, int] = field(default_factory=dict)
    """When which replica's engine ends; it comes back."""
    failures: Mapping[float, int] = field(default_factory=dict)
    """When which replica ends for ever."""
    drains: Mapping[float, int] = field(default_factory=dict)
    joins: tuple[float, ...] = ()
    """When a further replica is ready."""

    @property
    def end(self) -> float:
        return self.warm_seconds + self.measured_seconds

    @property
    def requests_per_second(self) -> float:
        return self.load * self.num_replicas * replica_capacity()


@dataclass(frozen=True, slots=True)
class Size:
    """A fleet and how long it is simulated."""

    num_replicas: int
    num_adapters: int
    warm_seconds: float
    measured_seconds: float

    def scenario(self, seed: int, load: float) -> Scenario:
        """Two restarts, a failure and a drain; a joining replica follows each of the last two."""
        warm, measured = self.warm_seconds, self.measured_seconds
        return Scenario(
            seed=seed,
            num_replicas=self.num_replicas,
            num_adapters=self.num_adapters,
            load=load,
            warm_seconds=warm,
            measured_seconds=measured,
            restarts={warm + 0.1 * measured: 0, warm + 0.5 * measured: 1},
            failures={warm + 0.2 * measured: 2},
            drains={warm + 0.7 * measured: 3},
            joins=(warm + 0.3 * measured, warm + 0.7 * measured),
        )


def replica_capacity() -> float:
    """Requests/s of a replica whose batch is full and whose adapters are all resident."""
    step = STEP_SECONDS + MAX_BATCH * ROW_SECONDS + TYPICAL_ADAPTERS_IN_BATCH * ADAPTER_SECONDS
    decoding = (MEAN_OUTPUT_TOKENS - 1) * step / MAX_BATCH
    prompt = (MEAN_PROMPT_TOKENS - PREFIX_TOKENS) * PROMPT_TOKEN_SECONDS
    return 1 / (decoding + prompt)
