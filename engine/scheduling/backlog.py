"""How much work waits for its first admission, and how long a newcomer would wait. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..request import Request
from .step_costs import StepCosts, StepShape

MEMORY = 0.95
"""How much of the average output length stays when one more is learned."""


@dataclass(slots=True)
class _Queued:
    weight: float
    requests: set[Request] = field(default_factory=set)


class Backlog:
    """Requests that never ran, by tenant, and what is known about how fast they go."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._tenants: dict[str, _Queued] = {}
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._weight = 0.0
        self._output_tokens: float | None = None

    def enter(self, request: Request) -> None:
        queued = self._tenants.get(request.tenant_id)
        if queued is None:
            queued = self._tenants[request.tenant_id] = _Queued(request.tenant_weight)
            self._weight += queued.weight
        queued.requests.add(request)
        self._num_requests += 1
        self._num_prompt_tokens += request.num_prompt_tokens

    def leave(self, request: Request) -> None:
        queued = self._tenants[request.tenant_id]
        queued.requests.remove(request)
        self._num_requests -= 1
        self._num_prompt_tokens -= request.num_prompt_tokens
        if not queued.requests:
            del self._tenants[request.tenant_id]
            self._weight = sum(other.weight for other in self._tenants.values())

    def learn_output(self, num_tokens: int) -> None:
        """A request has ended with so many tokens: others will be about as long."""
        known = self._output_tokens
        if known is None:
            self._output_tokens = float(num_tokens)
        else:
            self._output_tokens = MEMORY * known + (1 - MEMORY) * num_tokens

    def wait_seconds(self, request: Request, running: StepShape, *, num_free: int) -> float:
        """The expected time until the request first runs, at the tenant's share, after those of the
        tenant's others that are due no later.

        `num_free`: how many may be admitted before running requests have to end. Those end
        independently of each other, so the time until n have ended spreads by the square root of n;
        one standard deviation is added. Unknown costs count as 0.
        """
        queued = self._tenants.get(request.tenant_id)
        if queued is None:
            return 0.0
        ahead = [other for other in queued.requests if other.due_time <= request.due_time]
        if not ahead:
            return 0.0
        share = queued.weight / self._weight
        num_tokens = sum(other.num_prompt_tokens for other in ahead)
        prompts = min(num_tokens / share, self._num_prompt_tokens)
        num_ends = max(min(len(ahead) / share, self._num_requests) + 1 - num_free, 0.0)
        outputs = (num_ends + math.sqrt(num_ends)) * (self._output_tokens or 0.0)
        return self._costs.wait_seconds(int(prompts), int(outputs), running)
