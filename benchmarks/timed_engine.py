"""The real engine under a benchmark's load: the requester of each request, and the time of each
token.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from loraplex.adapters.identity import AdapterKey
from loraplex.api.bench.models import BaseShape, make_base
from loraplex.api.bench.summary import RequestTiming
from loraplex.engine.messages import Abort, FinishReason
from support.engine import LocalEngine

MEASURED_SHAPE = BaseShape(
    vocab_size=8_000,
    hidden_size=512,
    intermediate_size=1_408,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    max_model_len=1_536,
)
"""31 million parameters: small enough for two cores, large enough that a step is mostly maths."""
SMOKE_SHAPE = BaseShape(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_model_len=1_536,
)


@dataclass(frozen=True, slots=True)
class Order:
    """One request of a load."""

    prompt: list[int]
    num_output_tokens: int
    tenant_id: str = "bench"
    adapter: AdapterKey | None = None


class TimedEngine(LocalEngine):
    """An engine whose requests are timed; everything is greedy and ignores the end token."""

    def __init__(self, model: Path, directory: Path, **config: object) -> None:
        super().__init__(model, directory, **{"dtype": "float32", **config})
        self._sent: dict[str, float] = {}
        self._token_times: dict[str, list[float]] = {}
        self._open: set[str] = set()

    @property
    def weight_bytes(self) -> int:
        """Of the base, what every step reads; of the embedding it reads some rows alone."""
        return self.core.parts.cost.shared_bytes

    @property
    def matmul_rate(self) -> float:
        """Operations per second that the device reached in a large product when this was opened."""
        return self.core.parts.utilization.peak.flops_per_second

    @property
    def copy_bandwidth(self) -> float:
        """Bytes per second that the device reached in a large copy when this was opened."""
        return self.core.parts.utilization.peak.bytes_per_second

    def prompt_flops(self, num_prompts: int, length: int) -> float:
        """Of the base's products, without attention, for prompts of so many tokens each."""
        cost = self.core.parts.cost
        per_token = num_prompts * length * cost.shared_parameters
        return 2.0 * (per_token + num_prompts * cost.head_parameters)

    @property
    def num_running(self) -> int:
        return self.core.stats().num_running

    @property
    def num_waiting(self) -> int:
        return self.core.stats().num_waiting

    @property
    def num_open(self) -> int:
        """Requests that were sent and have not ended."""
        return len(self._open)

    def send(self, order: Order) -> str:
        """Submit an order now; returns its request id."""
        request_id = self.submit(
            order.prompt,
            order.adapter,
            tenant_id=order.tenant_id,
            max_tokens=order.num_output_tokens,
            ignore_eos=True,
        )
        self._sent[request_id] = time.perf_counter()
        self._token_times[request_id] = []
        self._open.add(request_id)
        return request_id

    def send_all(self, orders: Iterable[Order]) -> list[str]:
        return [self.send(order) for order in orders]

    def step(self) -> None:
        super().step()
        now = time.perf_counter()
        for request_id in tuple(self._open):
            answer, times = self.answers[request_id], self._token_times[request_id]
            times += [now] * (len(answer.token_ids) - len(times))
            if answer.finished:
                assert answer.finished.reason is FinishReason.LENGTH, answer.finished
                self._open.remove(request_id)

    def abort(self, request_id: str) -> None:
        """End a request early; its timing stays as it is."""
        self._open.discard(request_id)
        self.core.handle(Abort(request_id))

    def is_open(self, request_id: str) -> bool:
        return request_id in self._open

    def timing(self, request_id: str) -> RequestTiming:
        times = tuple(self._token_times[request_id])
        return RequestTiming(self._sent[request_id], times, len(times))

    def timings(self, request_ids: Sequence[str]) -> list[RequestTiming]:
        return [self.timing(request_id) for request_id in request_ids]

    def warm_up(self, batch_sizes: Sequence[int] = (1, 8)) -> None:
        """Let torch and the allocator see the steps once, before anything is timed."""
        for size in batch_sizes:
            self.send_all([Order([5 + row, 6, 7], 3, "warm-up") for row in range(size)])
            self.run()


def make_model(folder: Path, shape: BaseShape) -> Path:
    """The benchmark's base under `folder`, made if it is not there yet; weights are seeded."""
    path = folder / f"base-{shape.hidden_size}x{shape.num_layers}"
    make_base(path, shape)
    return path


def kv_bytes_per_token(shape: BaseShape) -> int:
    """Keys and values of all layers in fp32."""
    head_dim = shape.hidden_size // shape.num_heads
    return 2 * 4 * shape.num_layers * shape.num_kv_heads * head_dim


def random_prompt(rng: Random, shape: BaseShape, num_tokens: int) -> list[int]:
    return [rng.randrange(shape.vocab_size) for _ in range(num_tokens)]


def variable_length_trace(
    rng: Random,
    shape: BaseShape,
    num_requests: int,
    *,
    mean_prompt_tokens: int,
    mean_output_tokens: int,
    max_tokens: int,
) -> list[Order]:
    """Orders whose lengths spread as in chat traffic: exponentially, most short and a few long."""

    def draw(mean: int) -> int:
        return min(max(1, round(rng.expovariate(1 / mean))), max_tokens // 2)

    return [
        Order(random_prompt(rng, shape, draw(mean_prompt_tokens)), draw(mean_output_tokens))
        for _ in range(num_requests)
    ]
