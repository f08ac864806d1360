"""Service level objectives in bodies and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ...engine.messages import NO_TARGETS, LatencyTargets
from ...platform.tenants.slo import MAX_ITL_MS, MAX_TTFT_MS, MIN_ITL_MS, MIN_TTFT_MS, NO_SLO, Slo
from ..contract.answer_model import AnswerModel
from ..contract.request_model import RequestModel


class SloBody(RequestModel):
    """Targets in milliseconds. An omitted one is that of the tenant, or else the server's."""

    ttft_ms: Annotated[float, Field(ge=MIN_TTFT_MS, le=MAX_TTFT_MS)] | None = None
    """From arrival to the first token."""
    itl_ms: Annotated[float, Field(ge=MIN_ITL_MS, le=MAX_ITL_MS)] | None = None
    """Between tokens."""


@dataclass(frozen=True, slots=True)
class SloView(AnswerModel):
    """Targets in milliseconds."""

    ttft_ms: float | None
    """Null: the server's."""
    itl_ms: float | None


def slo_of(body: SloBody | None) -> Slo:
    """A tenant's."""
    return NO_SLO if body is None else Slo(body.ttft_ms, body.itl_ms)


def targets_of(body: SloBody | None) -> LatencyTargets:
    """A request's own."""
    return NO_TARGETS if body is None else LatencyTargets.of_ms(body.ttft_ms, body.itl_ms)
