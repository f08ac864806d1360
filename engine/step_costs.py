"""What a step costs, learned from the steps that ran. Torch-free."""

from __future__ import annotations

from typing import NamedTuple


class StepShape(NamedTuple):
    num_prefill_tokens: int
    num_decodes: int
    num_context_tokens: int
    """Positions already computed that the step's sequences attend to, summed over them."""


class StepCosts:
    """Nothing observed costs nothing: an engine that knows nothing refuses and defers nothing."""

    def observe(self, shape: StepShape, seconds: float) -> None: ...
    def observe_swap(self, num_bytes: int, seconds: float) -> None: ...
    def predict(self, shape: StepShape) -> float: ...
    def max_prefill_tokens(
        self, decodes: int, context: int, target_seconds: float, limit: int
    ) -> int: ...
    def recompute_seconds(self, num_tokens: int) -> float:
        """What computing these tokens again adds to steps that run anyway."""

    def swap_seconds(self, num_bytes: int) -> float:
        """One way; a preemption by swap pays it twice."""

    def wait_seconds(
        self, num_prefill_tokens: int, num_decode_tokens: int, running: StepShape
    ) -> float:
        """Until so many queued tokens are worked off by steps that decode as `running` does."""
