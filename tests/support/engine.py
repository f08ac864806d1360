"""The real engine in this process, with adapters served from a folder of blocks."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from loraplex.adapters.examination import IntakeReport, examine
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.invocation import InvocationTokens, adapter_start
from loraplex.adapters.manager import Tier
from loraplex.engine.config import EngineConfig
from loraplex.engine.core import EngineCore
from loraplex.engine.execution.grammars import Grammars
from loraplex.engine.kv_policy import KvPolicy
from loraplex.engine.messages import (
    Abort,
    AdapterEvicted,
    AdapterExplanation,
    AdapterFetched,
    AdapterFetchFailed,
    AdapterWanted,
    ErrorInfo,
    EvictionReceipt,
    FromEngine,
    GenerationRequest,
    Pooling,
    PrefixPiece,
    PrefixTransport,
    PromptOutput,
    RequestFinished,
    RequestStarted,
    SpeculationParams,
    StepEvents,
    Submit,
    TokenLogprobs,
    TokensGenerated,
)
from loraplex.engine.parts import open_parts
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.scheduler import Scheduler

MIB = 1 << 20
IDLE_SECONDS = 0.0002


@dataclass
class Answer:
    """Everything the engine said about one request."""

    token_ids: list[int] = field(default_factory=list)
    tokens: list[TokensGenerated] = field(default_factory=list)
    prompts: list[PromptOutput] = field(default_factory=list)
    started: RequestStarted | None = None
    finished: RequestFinished | None = None

    @property
    def end(self) -> RequestFinished:
        assert self.finished is not None
        return self.finished

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [entry for event in self.tokens for entry in event.logprobs or ()]


def make_request(
    request_id: str,
    prompt: Sequence[int],
    adapter: AdapterKey | None = None,
    *,
    tenant_id: str = "acme",
    adapter_start: int | None = 0,
    vocab_size: int | None = None,
    return_logits: bool = False,
    cache_namespace: str = "",
    group_id: str | None = None,
    priority: int = 0,
    speculation: SpeculationParams | None = None,
    remembers_output: bool = False,
    kv_policy: KvPolicy | None = None,
    is_endless: bool = False,
    exports_prefix: bool = False,
    prefix_transport: PrefixTransport = PrefixTransport.FRAMES,
    awaits_prefix: bool = False,
    pooling: Pooling | None = None,
    num_prompt_logprobs: int | None = None,
    num_lone_steps: int = 0,
    own_end_token_ids: tuple[int, ...] = (),
    **sampling: object,
) -> GenerationRequest:
    """A request, greedy unless told otherwise."""
    params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return GenerationRequest(
        request_id,
        adapter.tenant_id if adapter else tenant_id,
        list(prompt),
        params,
        adapter,
        adapter_start=adapter_start,
        vocab_size=vocab_size,
        own_end_token_ids=own_end_token_ids,
        cache_namespace=cache_namespace,
        return_logits=return_logits,
        num_lone_steps=num_lone_steps,
        group_id=group_id,
        priority=priority,
        speculation=speculation,
        remembers_output=remembers_output,
        kv_policy=kv_policy,
        is_endless=is_endless,
        exports_prefix=exports_prefix,
        prefix_transport=prefix_transport,
        awaits_prefix=awaits_prefix,
        pooling=pooling,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def _always_swap(scheduler: Scheduler) -> None:
    """Which preempted requests keep their KV would else depend on measured seconds."""
    swap_costs: Any = scheduler._swap_costs
    swap_costs.round_trip_seconds = lambda _: 0.0


class LocalEngine:
    """An EngineCore with its fetcher: submit, run until idle, read the answers."""

    def __init__(self, model: Path, blocks: Path, **config: object) -> None:
        """`config`: fields of EngineConfig, the engine's `clock`, `grammars` and `prefix_key`."""
        clock = cast(Callable[[], float], config.pop("clock", time.monotonic))
        grammars = cast(Grammars | None, config.pop("grammars", None))
        prefix_key = config.pop("prefix_key", None)
        settings: dict[str, object] = {
            "device": "cpu",
            "kv_cache_bytes": 4 * MIB,
            "arena_bytes": 4 * MIB,
            "host_cache_bytes": 8 * MIB,
            **config,
        }
        engine_config = EngineConfig(str(model), **settings)  # type: ignore[arg-type]
        prefix_key = cast(bytes | None, prefix_key)
        parts = open_parts(engine_config, clock=clock, prefix_key=prefix_key)
        _always_swap(parts.scheduler)
        self.core = EngineCore(replace(parts, grammars=grammars or parts.grammars))
        self.blocks = Path(tempfile.mkdtemp(dir=blocks))
        self.answers: dict[str, Answer] = defaultdict(Answer)
        self.evicted: list[AdapterKey] = []
        self.receipts: list[EvictionReceipt] = []
        """Of `evicted`."""
        self.pieces: list[PrefixPiece] = []
        self.explanations: list[AdapterExplanation] = []
        self.paths: dict[AdapterKey, Path] = {}
        self.vocab_sizes: dict[AdapterKey | None, int | None] = {}
        """Of adapters with tokens of their own."""
        self.invocations: dict[AdapterKey | None, InvocationTokens] = {}
        """Of activated LoRA."""
        self.broken: set[AdapterKey] = set()
        """Adapters whose fetch fails."""

    def add_adapter(self, folder: Path, tenant_id: str = "acme") -> AdapterKey:
        """Examine an adapter as a push does; it is fetched when a request first names it."""
        path = self.blocks / f"{len(self.paths)}.block"
        report = self.examine(folder, path)
        key = AdapterKey(tenant_id, report.digest)
        self.paths[key] = path
        self.vocab_sizes[key] = report.vocab_size
        self.invocations[key] = report.invocation_token_ids
        return key

    def examine(self, folder: Path, path: Path) -> IntakeReport:
        return examine(
            folder / "adapter_config.json",
            folder / "adapter_model.safetensors",
            path,
            layout=self.core.info.layout,
            serving_dtype=self.core.info.dtype,
            max_full_matrix_bytes=MIB,
        )

    def submit(
        self,
        prompt: Sequence[int],
        adapter: AdapterKey | None = None,
        *,
        request_id: str | None = None,
        **settings: Any,
    ) -> str:
        """Queue a request as `make_request` makes it; return its id."""
        request_id = request_id or f"r{len(self.answers)}"
        self.answers[request_id] = Answer()
        vocab_size = self.vocab_sizes.get(adapter)
        start = adapter_start(prompt, self.invocations.get(adapter, ()))
        request = make_request(
            request_id, prompt, adapter, adapter_start=start, vocab_size=vocab_size, **settings
        )
        self.core.handle(Submit(request))
        return request_id

    def abort(self, request_id: str) -> None:
        self.core.handle(Abort(request_id))

    def step(self) -> None:
        """One step, and the fetcher's answers to it."""
        messages = self.core.step()
        for message in messages:
            self._take(message)
        if not messages:
            time.sleep(IDLE_SECONDS)  # as the engine's process waits: loader threads need the lock

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.core.has_work:
            self.step()

    def generate(self, prompt: Sequence[int], adapter: AdapterKey | None = None) -> list[int]:
        """The greedy answer of one request that runs alone."""
        request_id = self.submit(prompt, adapter)
        self.run()
        return self.answers[request_id].token_ids

    def load_adapters(self) -> None:
        """All that were added, so that no request waits for its own: how many requests share a step
        would depend on the loader threads' speed."""
        for adapter in self.paths:
            self.submit([0], adapter, max_tokens=1)
        self.run()

    def tokens(self, request_ids: Iterable[str]) -> list[list[int]]:
        return [self.answers[request_id].token_ids for request_id in request_ids]

    def close(self) -> None:
        self.core.close()

    def _has(self, key: AdapterKey) -> bool:
        return key in self.paths and key not in self.broken

    def _take(self, message: FromEngine) -> None:
        match message:
            case AdapterWanted(key) if all(map(self._has, key.parts)):
                paths = tuple(str(self.paths[part]) for part in key.parts)
                self.core.handle(AdapterFetched(key, paths, Tier.STORE))
            case AdapterWanted(key):
                error = ErrorInfo("object_not_found", "no such object")
                self.core.handle(AdapterFetchFailed(key, error))
            case AdapterEvicted(key, receipt):
                self.evicted.append(key)
                self.receipts.append(receipt)
            case PrefixPiece():
                self.pieces.append(message)
            case AdapterExplanation():
                self.explanations.append(message)
            case StepEvents():
                self._take_events(message)

    def _take_events(self, events: StepEvents) -> None:
        for started in events.started:
            self.answers[started.request_id].started = started
        for read in events.prompts:
            self.answers[read.request_id].prompts.append(read)
        for generated in events.tokens:
            self.answers[generated.request_id].tokens.append(generated)
            self.answers[generated.request_id].token_ids += generated.token_ids
        for finished in events.finished:
            answer = self.answers[finished.request_id]
            assert answer.finished is None, "exactly one terminal event"
            answer.finished = finished
