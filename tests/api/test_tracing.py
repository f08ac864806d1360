"""Spans: their parents, their contents, and when there are none."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, StatusCode, TraceFlags
from starlette.types import Message, Receive, Scope, Send

from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.control_plane.refusals import Refusals
from loraplex.api.http.request_context import RequestContext
from loraplex.api.server.readiness import Readiness
from loraplex.api.telemetry import tracing
from loraplex.api.telemetry.canary_watch import CanaryWatch
from loraplex.api.telemetry.memories import Memories
from loraplex.api.telemetry.metrics import Metrics
from loraplex.api.telemetry.overview import Overview
from loraplex.api.telemetry.request_log import RequestLog
from loraplex.api.telemetry.request_measures import RequestMeasures
from loraplex.api.telemetry.tracing import EndedRequest, Tracing, open_tracing
from loraplex.engine.process.client import EngineClient
from loraplex.platform.errors import InvalidValue
from support.server import child_environment

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
END = 2_000_000_000
MEASURES = RequestMeasures("acme/bot@3", 7, 4, 5, 0.5, 0.25, 1.5, "stop")


class WrittenSpan(NonRecordingSpan):
    def __init__(self, name: str, parent: SpanContext, start: int, attributes: Any) -> None:
        super().__init__(SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(1)))
        self.name, self.parent, self.start, self.attributes = name, parent, start, attributes
        self.end_time: int | None = None
        self.status: Any = None

    def set_status(self, status: Any, description: str | None = None) -> None:
        self.status = status

    def end(self, end_time: int | None = None) -> None:
        self.end_time = end_time


class Recorder(trace.TracerProvider, trace.Tracer):
    """OpenTelemetry's interface without its SDK: keeps what it is given."""

    def __init__(self) -> None:
        self.spans: list[WrittenSpan] = []

    def get_tracer(self, *_args: Any, **_kwargs: Any) -> trace.Tracer:
        return self

    def start_span(self, name: str, context: Any = None, **details: Any) -> WrittenSpan:  # type: ignore[override]
        parent = trace.get_current_span(context).get_span_context()
        span = WrittenSpan(name, parent, details["start_time"], details["attributes"])
        self.spans.append(span)
        return span

    def start_as_current_span(self, *_args: Any, **_kwargs: Any) -> Iterator[Any]:  # type: ignore[override]
        raise AssertionError("a span is never current")


def written(**changes: Any) -> WrittenSpan:
    recorder = Recorder()
    details: dict[str, Any] = {
        "request_id": "req-1",
        "tenant_id": "acme-id",
        "method": "POST",
        "route": "/v1/chat/completions",
        "status": 200,
        "code": "",
        "seconds": 0.5,
        "headers": {},
        "measures": MEASURES,
        **changes,
    }
    Tracing(recorder, clock=lambda: END).record(EndedRequest(**details))
    (span,) = recorder.spans
    return span


def test_a_span_says_who_asked_what_and_how_it_went() -> None:
    span = written()
    assert span.name == "POST /v1/chat/completions"
    assert (span.start, span.end_time) == (END - 500_000_000, END)
    assert span.status is None
    assert span.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.response.model": "acme/bot@3",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.output_tokens": 5,
        "loraplex.request_id": "req-1",
        "loraplex.tenant_id": "acme-id",
        "loraplex.queue_seconds": 0.5,
        "loraplex.adapter_wait_seconds": 0.25,
        "loraplex.time_to_first_token_seconds": 1.5,
    }


def test_the_callers_trace_goes_on() -> None:
    parent = written(headers=TRACEPARENT).parent
    assert (parent.trace_id, parent.span_id) == (int(TRACE_ID, 16), int(SPAN_ID, 16))


@pytest.mark.parametrize("headers", [{}, {"traceparent": "00-zz-1-01"}], ids=str)
def test_without_a_valid_parent_a_trace_begins(headers: dict[str, str]) -> None:
    assert not written(headers=headers).parent.is_valid


@pytest.mark.parametrize(
    ("status", "code", "is_failure"),
    [
        (404, "model_not_found", False),
        (503, "engine_unavailable", True),
        (200, "engine_restarted", True),
        (200, "client_disconnected", False),
    ],
)
def test_only_our_own_failures_are_failed_spans(status: int, code: str, is_failure: bool) -> None:
    span = written(status=status, code=code, measures=RequestMeasures())
    assert span.attributes["error.type"] == code
    assert (span.status is not None) == is_failure
    if is_failure:
        assert span.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(("route", "num_spans"), [("/v1/completions", 1), ("/health", 0)])
def test_the_outermost_layer_writes_a_span_per_request_of_the_api(
    route: str, num_spans: int
) -> None:
    recorder = Recorder()
    metrics = Metrics(lambda: None)
    runtime = SimpleNamespace(
        metrics=metrics,
        tracing=Tracing(recorder),
        readiness=Readiness(cast(EngineClient, None)),
        request_log=RequestLog(cast(ControlPlane, None), metrics),
        settings=SimpleNamespace(allowed_hosts=None, trusted_proxies=()),
        overview=Overview(cast(ControlPlane, None), cast(Memories, None), "server"),
        refusals=Refusals(cast(ControlPlane, None)),
        canary_watch=CanaryWatch(cast(ControlPlane, None), metrics),
    )
    scope = {
        "type": "http",
        "scheme": "http",
        "method": "POST",
        "path": route,
        "headers": [(name.encode(), value.encode()) for name, value in TRACEPARENT.items()],
        "app": SimpleNamespace(state=SimpleNamespace(runtime=runtime)),
        "route": SimpleNamespace(path=route),
    }

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["measures"].model = "acme/bot@3"
        scope["state"]["tenant_id"] = "acme-id"
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    asyncio.run(RequestContext(answer)(scope, receive, send))
    assert len(recorder.spans) == num_spans
    for span in recorder.spans:
        assert span.attributes["gen_ai.response.model"] == "acme/bot@3"
        assert span.attributes["loraplex.tenant_id"] == "acme-id"
        assert span.parent.trace_id == int(TRACE_ID, 16)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"},
    ],
    ids=str,
)
def test_it_is_off_unless_asked_for(environment: dict[str, str]) -> None:
    assert open_tracing(is_wanted=None, environment=environment) is None


def test_the_operators_no_goes_before_opentelemetrys_own_variables() -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}
    assert open_tracing(is_wanted=False, environment=environment) is None


def test_off_it_imports_nothing_of_opentelemetrys_sdk() -> None:
    script = (
        "import sys, loraplex.api.server.runtime;"
        "from loraplex.api.telemetry.tracing import open_tracing;"
        "open_tracing(is_wanted=None, environment={});"
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"


@pytest.fixture
def without_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)


@pytest.mark.usefixtures("without_sdk")
def test_what_is_wanted_and_not_installed_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"loraplex\[otel\]"):
        open_tracing(is_wanted=True, environment={})


@pytest.mark.usefixtures("without_sdk")
def test_variables_that_others_read_too_refuse_nothing() -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}
    assert open_tracing(is_wanted=None, environment=environment) is None


def test_the_sdk_takes_our_spans() -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter = export.InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    request = EndedRequest(
        request_id="req-1",
        tenant_id=None,
        method="GET",
        route="/v1/models",
        status=200,
        code="",
        seconds=0.25,
        headers=TRACEPARENT,
        measures=MEASURES,
    )
    Tracing(provider, clock=lambda: END).record(request)
    (span,) = exporter.get_finished_spans()
    assert (span.start_time, span.end_time) == (END - 250_000_000, END)
    assert span.context.trace_id == int(TRACE_ID, 16)
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)


def test_a_collector_that_takes_nothing_holds_up_no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 0.05)
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.sdk.trace import TracerProvider

    released = threading.Event()
    ended: list[bool] = []
    monkeypatch.setattr(TracerProvider, "shutdown", lambda _: ended.append(released.wait(60)))
    opened = open_tracing(is_wanted=True, environment={})
    assert opened is not None
    opened.close()
    assert ended == [], "it was not waited for"
    released.set()
