"""Whether this server accepts requests, for load balancers; a drain makes it not ready."""

from __future__ import annotations

from ...engine.process.engine import Engine, EngineState
from ..contract.errors import ApiError

_REASONS = {
    EngineState.STARTING: "The engine is starting.",
    EngineState.STALLED: "The engine made no progress and is restarting.",
    EngineState.RESTARTING: "The engine stopped and is restarting.",
    EngineState.DOWN: "The engine stopped too often and is not restarted; see the server's log.",
}


class Readiness:
    """Whether requests are accepted, and how many are running."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_draining = False
        self.num_requests = 0
        """Requests of the API that have no complete answer yet."""

    @property
    def refusal(self) -> ApiError | None:
        """The response to every request now; None: normal processing."""
        return ApiError("shutting_down") if self.is_draining else None

    def check(self) -> None:
        """Raises ApiError with the reason if generation requests are not accepted now."""
        if self.refusal is not None:
            raise self.refusal
        reason = _REASONS.get(self._engine.state)
        if reason is not None:
            raise ApiError("engine_unavailable", reason)
