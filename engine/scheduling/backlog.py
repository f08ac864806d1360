"""How much work waits for its first admission, and how long a newcomer would wait. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ..request import Request
from .step_costs import StepCosts, StepShape

MEMORY = 0.95
"""How much of the average output length stays when one more is learned."""


@dataclass(slots=True)
class _Queued:
    weight: float = 1.0
    num_requests: int = 0
    num_prompt_tokens: int = 0


class Backlog:
    """Requests that never ran, by tenant, and what is known about how fast they go."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._tenants: dict[str, _Queued] = {}
        self._total = _Queued()
        self._weight = 0.0
        self._output_tokens: float | None = None

    def enter(self, request: Request) -> None:
        queued = self._tenants.get(request.tenant_id)
        if queued is None:
            queued = self._tenants[request.tenant_id] = _Queued(request.tenant_weight)
            self._weight += queued.weight
        for part in (queued, self._total):
            part.num_requests += 1
            part.num_prompt_tokens += request.num_prompt_tokens

    def leave(self, request: Request) -> None:
        queued = self._tenants[request.tenant_id]
        for part in (queued, self._total):
            part.num_requests -= 1
            part.num_prompt_tokens -= request.num_prompt_tokens
        if not queued.num_requests:
            del self._tenants[request.tenant_id]
            self._weight = sum(other.weight for other in self._tenants.values())

    def learn_output(self, num_tokens: int) -> None:
        """A request has ended with so many tokens: others will be about as long."""
        known = self._output_tokens
        if known is None:
            self._output_tokens = float(num_tokens)
        else:
            self._output_tokens = MEMORY * known + (1 - MEMORY) * num_tokens

    def wait_seconds(self, request: Request, running: StepShape, *, is_full: bool) -> float:
        """The expected time until the request first runs, after its tenant's others, at the
        tenant's share.

        `is_full`: running requests must end before others are admitted. Unknown costs count as 0,
        so the estimate is rather too short.
        """
        ahead = self._tenants.get(request.tenant_id)
        if ahead is None:
            return 0.0
        share = ahead.weight / self._weight
        prompts = min(ahead.num_prompt_tokens / share, self._total.num_prompt_tokens)
        requests = min(ahead.num_requests / share, self._total.num_requests)
        outputs = requests * (self._output_tokens or 0.0) if is_full else 0.0
        return self._costs.wait_seconds(int(prompts), int(outputs), running)
