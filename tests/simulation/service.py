"""Checks that tenants are charged for their service: prompts once, outputs as generated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from loraplex.engine.request import Request
from loraplex.engine.scheduling.batch import ScheduledSequence
from loraplex.engine.scheduling.scheduler import Scheduler

from .violation import Invariant, require

EPSILON = 1e-6


class ServiceChecks:
    """Listens to what is charged, and compares it with what was served."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._counters = scheduler.counters
        self._charge = scheduler._charge
        self._take = scheduler.take
        self._deactivate = scheduler.counters.deactivate
        self._idled: set[str] = set()
        """Who was idle at some moment of this step."""
        self._inputs: defaultdict[str, int] = defaultdict(int)
        self._outputs: defaultdict[str, int] = defaultdict(int)
        self._services: defaultdict[str, float] = defaultdict(float)
        """By tenant, divided by its weight, in this step."""
        self._active: dict[str, float] = {}
        """The counters of those that were active when the last step ended."""
        vars(scheduler)["_charge"] = self._note_charge
        vars(scheduler)["take"] = self._note_outputs
        vars(self._counters)["deactivate"] = self._note_idle

    def _note_charge(self, request: Request, input_tokens: int) -> None:
        self._inputs[request.request_id] += input_tokens
        self._note_service(request, self._counters.input_weight * input_tokens)
        self._charge(request, input_tokens)

    def _note_outputs(self, outputs: Sequence[tuple[ScheduledSequence, list[int], int]]) -> None:
        for sequence, token_ids, _ in outputs:
            request = sequence.request
            self._outputs[request.request_id] += len(token_ids)
            self._note_service(request, self._counters.output_weight * len(token_ids))
        self._take(outputs)

    def _note_service(self, request: Request, service: float) -> None:
        if not request.is_background:  # which is free
            self._services[request.tenant_id] += service / request.tenant_weight

    def _note_idle(self, tenant_id: str) -> None:
        self._idled.add(tenant_id)
        self._deactivate(tenant_id)

    def check(self) -> None:
        """Counters grow by the service, and whoever returns from idleness has no credit."""
        active = {
            tenant_id: self._counters.counter(tenant_id) for tenant_id in self._counters._active
        }
        stayed = (active.keys() & self._active.keys()) - self._idled
        # Somebody was active all the time, so the least of them never fell below this.
        floor = min(self._active.values()) if stayed else None
        for tenant_id, counter in active.items():
            before = self._active.get(tenant_id)
            if before is not None:
                require(
                    counter >= before + self._services[tenant_id] - EPSILON,
                    Invariant.SERVICE,
                    f"{tenant_id}: from {before} to {counter} by {self._services[tenant_id]}",
                )
            elif floor is not None:
                require(
                    counter >= floor - EPSILON,
                    Invariant.SERVICE,
                    f"{tenant_id} returns with {counter}, the others have {floor}",
                )
        self._active = active
        self._services.clear()
        self._idled.clear()

    def settle(self, request: Request, reason: str) -> None:
        """A request has ended: its prompt was charged at most once, what it generated exactly."""
        inputs = self._inputs.pop(request.request_id, 0)
        outputs = self._outputs.pop(request.request_id, 0)
        name, prompt = request.request_id, request.num_prompt_tokens
        require(inputs <= prompt, Invariant.SERVICE, f"{name}: {inputs} charged of {prompt}")
        require(
            outputs == request.num_generated_tokens,
            Invariant.SERVICE,
            f"{name}: {outputs} charged, {request.num_generated_tokens} generated",
        )
        if reason in ("length", "stop") and not request.num_preemptions:
            # Who was preempted may find more of its prompt computed when it comes back.
            computed = prompt - request.num_cached_tokens
            require(inputs >= computed, Invariant.SERVICE, f"{name}: {inputs} of {computed}")
