"""The simulated requests: prompts that share prefixes, diverge and continue earlier answers."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from loraplex.engine.kv_policy import EvictionMethod, KvPolicy
from loraplex.engine.messages import GenerationRequest, LatencyTargets, Pooling
from loraplex.engine.sampling_params import SamplingParams

from .contents import VOCABULARY
from .scenario import Scenario, Tenant

MAX_PAST = 24


class Demand:
    """Draws requests. All tenants use the same templates: only the namespace keeps them apart."""

    def __init__(self, scenario: Scenario, rng: Random) -> None:
        self._scenario = scenario
        self._rng = rng
        self._asking = Random(scenario.seed + 3)
        """What is asked of prompts changes nothing of what else is drawn."""
        self._policies = Random(scenario.seed + 4)
        """Likewise for KV policies."""
        self._backgrounds = Random(scenario.seed + 5)
        """Likewise for background requests."""
        self._invocations = Random(scenario.seed + 6)
        """Likewise for where activated adapters start."""
        self._objectives = Random(scenario.seed + 7)
        """Likewise for targets of their own."""
        self._own_targets_share = self._objectives.choice((0.0, 0.5, 0.9))
        self._activated_share = self._invocations.choice((0.0, 0.0, 0.5))
        self._background_share = self._backgrounds.choice((0.0, 0.0, 0.0, 0.1, 0.4))
        self._num_requests = 0
        self._max_len = scenario.limits.max_model_len
        self._templates = [self._tokens(rng.randint(1, self._max_len - 2)) for _ in range(3)]
        self._past: list[list[int]] = []

    def remember(self, token_ids: list[int]) -> None:
        """An answer that somebody may go on from."""
        self._past.append(token_ids)
        if len(self._past) > MAX_PAST:
            del self._past[0]

    def tenant(self) -> Tenant:
        tenants = self._scenario.tenants
        return self._rng.choices(tenants, [tenant.demand for tenant in tenants])[0]

    def draw(self, tenant: Tenant) -> list[GenerationRequest]:
        """One request, or the group of a request with `n > 1`."""
        rng = self._rng
        prompt = self._prompt()
        max_tokens = rng.randint(1, max(1, min(self._max_len - len(prompt), 24)))
        number = rng.choice((2, 3, 4)) if rng.random() < 0.12 else 1
        return self._requests(tenant, prompt, max_tokens, number)

    def draw_too_long(self, tenant: Tenant) -> GenerationRequest:
        """More than the limits allow, though the prompt alone may fit."""
        length = self._rng.randint(1, self._max_len + 5)
        max_tokens = self._max_len - min(length, self._max_len) + self._rng.randint(1, 9)
        return self._requests(tenant, self._tokens(length), max_tokens, 1)[0]

    def again(self, submitted: GenerationRequest) -> GenerationRequest:
        """The same request under a new id, as the client of an engine that restarted sends it."""
        return replace(submitted, request_id=self._next_id(), group_id=None)

    def _requests(
        self, tenant: Tenant, prompt: list[int], max_tokens: int, number: int
    ) -> list[GenerationRequest]:
        rng = self._rng
        adapter = rng.choice(tenant.adapters)
        priority = rng.choice((-1, 0, 0, 0, 2))
        deadline = None
        if rng.random() < 0.15:
            deadline = self._scenario.deadline_seconds * rng.uniform(0.1, 3.0)
        group, ignore_eos = self._next_id(), rng.random() < 0.7
        pooling, num_logprobs = self._asked_of_prompt() if number == 1 else (None, None)
        policy = self._policy()
        adapter_start = self._adapter_start(prompt) if adapter else 0
        is_background = self._backgrounds.random() < self._background_share
        targets = self._targets()
        max_tokens = 0 if pooling or self._asking.random() < 0.02 else max_tokens
        return [
            GenerationRequest(
                request_id=self._next_id(),
                tenant_id=tenant.tenant_id,
                prompt_token_ids=list(prompt),
                sampling=SamplingParams(
                    max_tokens=max_tokens, seed=rng.randrange(1000), ignore_eos=ignore_eos
                ),
                adapter=adapter,
                adapter_start=adapter_start,
                group_id=group if number > 1 else None,
                kv_policy=policy,
                priority=priority,
                tenant_weight=tenant.weight,
                deadline_seconds=deadline,
                pooling=pooling,
                num_prompt_logprobs=num_logprobs,
                is_background=is_background,
                targets=targets,
            )
            for _ in range(number)
        ]

    def _adapter_start(self, prompt: list[int]) -> int | None:
        """Templates are invoked at few places, so that prompts share what is before and behind."""
        rng = self._invocations
        if rng.random() >= self._activated_share:
            return 0
        places = (0, len(prompt) // 2, len(prompt) - 1, rng.randrange(len(prompt)))
        return rng.choice((*places, None))

    def _targets(self) -> LatencyTargets:
        """Of a strict or a lenient class, or the server's."""
        rng = self._objectives
        if rng.random() >= self._own_targets_share:
            return LatencyTargets()
        return LatencyTargets(rng.choice((0.03, 0.3, 3.0)), rng.choice((None, 0.003, 0.05)))

    def _policy(self) -> KvPolicy | None:
        """Of a quarter, where the cache supports them."""
        rng = self._policies
        method = rng.choice([None] * 6 + [*EvictionMethod])
        budget = rng.randint(2, 2 * self._scenario.limits.block_size + 3)
        if method is None or any(group.window is not None for group in self._scenario.groups):
            return None
        return KvPolicy(method, max(budget, method.min_budget))

    def _asked_of_prompt(self) -> tuple[Pooling | None, int | None]:
        """Of most nothing."""
        nothing, scored = (None, None), (None, 0)
        last, mean = (Pooling.LAST, None), (Pooling.MEAN, None)
        return self._asking.choice((*[nothing] * 20, *[scored] * 6, last, mean))

    def _prompt(self) -> list[int]:
        rng = self._rng
        longest = self._max_len - 1
        if self._past and rng.random() < 0.3:
            begin = rng.choice(self._past)
        else:
            begin = rng.choice(self._templates)
        begin = begin[: rng.randint(1, len(begin))] if rng.random() < 0.3 else begin
        prompt = begin + self._tokens(rng.choice((0, 1, 1, 3, 8)))
        return prompt[:longest]

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1, VOCABULARY) for _ in range(count)]

    def _next_id(self) -> str:
        self._num_requests += 1
        return f"r{self._num_requests}"
