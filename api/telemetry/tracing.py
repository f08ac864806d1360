"""OpenTelemetry spans, one per request. Without the extra, nothing of it is imported.

A span is written when its request has ended, with the request's own times. The client may have
started the trace (W3C `traceparent`). It contains names, figures and codes, never text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from ...platform.errors import InvalidValue
from ...platform.version import __version__
from ..contract.error_codes import ERROR_CODES
from .request_measures import RequestMeasures

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

log = structlog.get_logger(__name__)

NANOSECONDS = 1_000_000_000
FLUSH_SECONDS = 2.0
"""How long a stopping server waits for the collector to receive the last spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """The contents of a span."""

    request_id: str
    tenant_id: str | None
    method: str
    route: str
    status: int
    """0: no response was sent."""
    code: str
    """The error code; empty without an error."""
    seconds: float
    headers: Mapping[str, str]
    measures: RequestMeasures


class Tracing:
    """Writes spans with one tracer."""

    def __init__(
        self,
        provider: TracerProvider,
        *,
        close: Callable[[], None] = lambda: None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """`clock`: nanoseconds since 1970."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("loraplex", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._clock = clock
        self.close = close
        """Sends the pending spans."""

    def record(self, request: EndedRequest) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end = self._clock()
        span = self._tracer.start_span(
            f"{request.method} {request.route}",
            context=self._propagator.extract(request.headers),
            kind=SpanKind.SERVER,
            attributes={
                name: value for name, value in _attributes(request).items() if value is not None
            },
            start_time=end - int(request.seconds * NANOSECONDS),
        )
        if _is_our_failure(request):
            span.set_status(Status(StatusCode.ERROR, request.code))
        span.end(end)


def open_tracing(*, is_wanted: bool | None, environment: Mapping[str, str]) -> Tracing | None:
    """Tracing according to the operator's settings: None if it is off.

    `is_wanted` None leaves it to OpenTelemetry's own variables, which also configure the
    destination and the sampling. Raises InvalidValue if it is wanted but not installed.
    """
    if not (_is_configured(environment) if is_wanted is None else is_wanted):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        message = "OpenTelemetry is not installed: pip install 'loraplex[otel]'."
        if is_wanted:
            raise InvalidValue(message, param="otel") from exc
        log.warning("tracing_is_off", reason=message, error=str(exc))
        return None
    name = environment.get("OTEL_SERVICE_NAME", "loraplex")
    provider = TracerProvider(
        resource=Resource.create({"service.name": name}), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider, close=lambda: _within(FLUSH_SECONDS, provider.shutdown))


def _within(seconds: float, action: Callable[[], object]) -> None:
    """Run the action, and wait for at most this time. A thread that ends with the process continues
    it."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)


def _is_configured(environment: Mapping[str, str]) -> bool:
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER")
    if exporter is not None:
        return exporter == "otlp"
    return any(
        environment.get(f"OTEL_EXPORTER_OTLP_{name}") for name in ("ENDPOINT", "TRACES_ENDPOINT")
    )


def _attributes(request: EndedRequest) -> dict[str, str | int | float | Sequence[str] | None]:
    """Named by OpenTelemetry's conventions for HTTP and generative AI where they have a name."""
    measures = request.measures
    return {
        "http.request.method": request.method,
        "http.route": request.route,
        "http.response.status_code": request.status or None,
        "error.type": request.code or None,
        "gen_ai.response.model": measures.model,
        "gen_ai.response.finish_reasons": measures.finish_reason and [measures.finish_reason],
        "gen_ai.usage.input_tokens": measures.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": measures.cached_tokens,
        "gen_ai.usage.output_tokens": measures.completion_tokens,
        "loraplex.request_id": request.request_id,
        "loraplex.tenant_id": request.tenant_id,
        "loraplex.queue_seconds": measures.queue_seconds,
        "loraplex.adapter_wait_seconds": measures.adapter_wait_seconds,
        "loraplex.time_to_first_token_seconds": measures.first_token_seconds,
    }


def _is_our_failure(request: EndedRequest) -> bool:
    """Also of a stream that had begun as a success."""
    published = ERROR_CODES.get(request.code)
    return request.status >= 500 or (published is not None and published.status >= 500)
