"""Scheduling and speculation parameters on the way to the engine, and `Retry-After` of refusals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from starlette.requests import Request

from loraplex.api.contract.errors import ApiError, as_api_error, from_error_info
from loraplex.api.http.error_responses import error_response
from loraplex.api.inference.inference import Inference
from loraplex.api.inference.order import Order
from loraplex.api.inference.served_models import ServedModel
from loraplex.api.telemetry.metrics import Metrics
from loraplex.engine.errors import (
    EngineError,
    EngineUnavailable,
    Overloaded,
    ProposerNotServed,
    TenantQueueFull,
)
from loraplex.engine.messages import (
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    RequestFinished,
    SpeculationParams,
)
from loraplex.engine.process.client import EngineClient
from loraplex.engine.process.request_end import RequestEnd
from loraplex.engine.process.request_stream import RequestEvent
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.text_form import TextForm
from loraplex.platform.tenants.slo import NO_SLO
from support.envelopes import check_envelope
from support.fake_engine import fake_info
from support.server import Caller, ServerUnderTest


class RecordingEngine:
    """Notes what it was given, and ends it with an error."""

    info = replace(fake_info("base"), proposers=["ngram"])

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    def submit(
        self, request: GenerationRequest, take: Callable[[RequestEvent], None], counter: object
    ) -> SimpleNamespace:
        self.requests.append(request)
        error = ErrorInfo(EngineUnavailable.code, "planted")
        end = RequestFinished(request.request_id, FinishReason.ERROR, 1, 0, error)
        asyncio.get_running_loop().call_soon(take, end)
        request_end = RequestEnd()
        request_end.come(end)
        return SimpleNamespace(close=lambda: None, end=request_end)


class FakeMetering:
    """Has room for every request."""

    def open(
        self, *_: object, counts_prompt: list[bool], admitted_at: object, held: object
    ) -> SimpleNamespace:
        return SimpleNamespace(counters=counts_prompt)

    async def settle(self, *_: object) -> None: ...


def submitted(num_choices: int = 1, **fields: Any) -> list[GenerationRequest]:
    """The engine's requests of an order that came a second ago."""
    engine = RecordingEngine()
    tokenizer = SimpleNamespace(
        eos_token_ids=frozenset(),
        own_eos_token_ids=frozenset(),
        special_token_ids=frozenset(),
        decodes_bytes=False,
        render_chat=lambda *_, **__: "",
        decode=lambda *_, **__: "",
        chat_template_text="",
    )
    nothing = cast(Any, tokenizer)
    inference = Inference(
        engine=cast(EngineClient, engine),
        tokenizer=nothing,
        version_tokenizers=nothing,
        control_plane=nothing,
        metering=cast(Any, FakeMetering()),
        seen_adapters=nothing,
        admission=AsyncMock(),
        metrics=Metrics(lambda: None),
        live_answers=nothing,
        served_model_name="base",
        adapter_wait_seconds=1.0,
        samples=nothing,
    )
    order = Order(
        request_id="r",
        arrived_at=time.monotonic() - 1,
        principal=cast(
            Any,
            SimpleNamespace(
                tenant_id="acme",
                key_id=None,
                tenant_weight=2.0,
                tenant_slo=NO_SLO,
                is_limited=False,
            ),
        ),
        model=ServedModel("base", None),
        prompts=[[1]],
        num_choices=num_choices,
        sampling=SamplingParams(),
        text=TextForm(continues_prompt=True),
        **fields,
    )
    try:
        with pytest.raises(ApiError) as failure:
            asyncio.run(inference.start(order))
        assert failure.value.code == EngineUnavailable.code
    finally:
        asyncio.run(inference.aclose())
    return engine.requests


def test_the_engine_remembers_the_output_of_a_request_of_which_a_sample_is_kept() -> None:
    sample = SimpleNamespace(complete=lambda *_: None)
    assert submitted(sample=sample)[0].remembers_output
    assert not submitted()[0].remembers_output


def test_the_priority_reaches_the_engine() -> None:
    assert submitted(priority=-7)[0].priority == -7
    assert submitted()[0].priority == 0


def test_only_the_first_sequence_of_a_call_has_a_ttft_target() -> None:
    assert [request.has_ttft_target for request in submitted(3)] == [True, False, False]


def test_how_tokens_are_drafted_reaches_the_engine_for_every_choice() -> None:
    asked = SpeculationParams("ngram", 4)
    assert [request.speculation for request in submitted(3, speculation=asked)] == [asked] * 3
    assert submitted()[0].speculation is None


def test_nothing_is_submitted_for_a_proposer_that_the_engine_does_not_run() -> None:
    with pytest.raises(ProposerNotServed, match=r"medusa.*ngram"):
        submitted(speculation=SpeculationParams("medusa"))


def test_a_deadline_counts_from_the_arrival_of_the_request() -> None:
    seconds = submitted(deadline_ms=3000)[0].deadline_seconds
    assert seconds is not None
    assert 1.5 < seconds <= 2.0
    assert submitted(deadline_ms=500)[0].deadline_seconds == 0.0
    assert submitted()[0].deadline_seconds is None


@pytest.mark.parametrize(
    ("error", "status"),
    [(Overloaded(retry_after_seconds=7.2), 503), (TenantQueueFull(retry_after_seconds=7.2), 429)],
)
def test_a_refusal_for_lack_of_room_says_when_to_come_back(error: EngineError, status: int) -> None:
    scope = {"type": "http", "path": "/v1/models", "state": {"request_id": "req-1"}}
    request = Request(scope)
    crossed = from_error_info(ErrorInfo(error.code, str(error), error.retry_after_seconds))
    for published in (as_api_error(error), crossed):
        answer = error_response(request, published)
        assert answer.status_code == status
        assert answer.headers["retry-after"] == "8"
        assert answer.headers["retry-after-ms"] == "7200"


@pytest.mark.parametrize(
    "field", [{"priority": 1001}, {"priority": -1001}, {"priority": 0.5}, {"deadline_ms": 0}]
)
def test_values_out_of_range_are_refused_by_name(caller: Caller, field: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": "x", **field}
    answer = caller.http.post("/v1/completions", json=body)
    check_envelope(answer, "invalid_parameter", param=next(iter(field)))


def test_what_misses_its_deadline_is_a_504_and_the_rest_is_served(
    server: ServerUnderTest, caller: Caller
) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 480, "ignore_eos": True}
    for deadline_ms in (1, 50):  # over before it is queued, and while it runs
        late = caller.http.post("/v1/completions", json={**body, "deadline_ms": deadline_ms})
        check_envelope(late, "deadline_exceeded")
    body = {**body, "max_tokens": 4, "priority": 3, "deadline_ms": 60_000}
    answer = caller.http.post("/v1/completions", json=body)
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert server.is_ready()
