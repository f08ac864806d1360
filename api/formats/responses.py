"""The format of responses and their stream events.

A complete response is assembled from the same events, so a stream and a complete response cannot
differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from ...engine.text.tokenizer import Tokenizer
from ..contract.answer_model import AnswerModel
from ..contract.errors import ApiError, error_body
from ..http.json_response import encode_json
from ..http.sse import PING, sse_data
from ..inference.order import Order
from ..inference.sequence_text import Delta
from ..schemas.answers import Usage
from ..schemas.response_objects import (
    ErrorEvent,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseEvent,
    ResponseUsage,
    Status,
)
from ..schemas.responses import ResponsesBody
from ..tools.answer_plan import AnswerPlan
from .chat_logprobs import chat_logprob
from .response_output import EventNumbers, ResponseOutput


class ResponsesFormat:
    """The answer of one request."""

    ending = b""
    """The last event marks the end."""
    ping = PING

    def __init__(
        self, body: ResponsesBody, order: Order, plan: AnswerPlan, tokenizer: Tokenizer
    ) -> None:
        self._body = body
        asked = {"text", "tool_choice", "tools"}
        self._asked = body.model_dump(mode="json", by_alias=True, exclude_unset=True, include=asked)
        self._request_id = order.request_id
        self._created_at = int(time.time())
        self._model = order.model.name
        self._sampling = order.sampling
        self._reader = plan.make_reader()
        self._tokenizer = tokenizer
        self._numbers = EventNumbers()
        self._output = ResponseOutput(order.request_id, self._numbers)
        self._status: Status = "in_progress"

    def opening(self) -> Iterator[ResponseEvent]:
        for kind in ("response.created", "response.in_progress"):
            yield self._numbers.event(kind, response=self.response(None))

    def events(self, delta: Delta) -> bytes:
        return b"".join(map(self.event, self.chunks(delta)))

    def chunks(self, delta: Delta) -> Iterator[ResponseEvent]:
        logprobs = [chat_logprob(self._tokenizer, entry) for entry in delta.logprobs]
        yield from self._output.push(self._reader.push(delta.text), logprobs)
        if delta.finish_reason is not None:
            yield from self._output.push(self._reader.finish(), [])
            self._status = "completed" if delta.finish_reason == "stop" else "incomplete"
            yield from self._output.finish(self._status)

    def closing(self, usage: Usage) -> Iterator[ResponseEvent]:
        yield self._numbers.event(f"response.{self._status}", response=self.response(usage))

    def event(self, chunk: AnswerModel) -> bytes:
        assert isinstance(chunk, ResponseEvent)
        return sse_data(encode_json(chunk), name=chunk.type)

    def failure(self, error: ApiError, request_id: str) -> bytes:
        event = ErrorEvent(
            sequence_number=self._numbers.next,
            code=error.code,
            message=error.message,
            param=error.param,
            error=error_body(error, request_id),
        )
        return sse_data(encode_json(event), name=event.type)

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> Response:
        (deltas,) = choices
        for delta in deltas:
            for _ in self.chunks(delta):
                pass
        return self.response(usage)

    def response(self, usage: Usage | None) -> Response:
        """As far as it has come; complete after the last delta."""
        body, asked = self._body, self._asked
        is_cut = self._status == "incomplete"
        return Response(
            id=f"resp_{self._request_id}",
            created_at=self._created_at,
            status=self._status,
            model=self._model,
            output=list(self._output.items),
            usage=None if usage is None else _usage(usage),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=self._sampling.temperature,
            text={"format": {"type": "text"}, **(asked.get("text") or {})},
            tool_choice=_tool_choice(asked.get("tool_choice")),
            tools=asked.get("tools") or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=self._sampling.top_p,
            user=body.user,
            previous_response_id=body.previous_response_id,
            store=body.store is True,
        )


def _tool_choice(asked: dict[str, object] | None) -> str | dict[str, object]:
    if asked is None:
        return "auto"
    return str(asked["type"]) if len(asked) == 1 else asked


def _usage(usage: Usage) -> ResponseUsage:
    details = usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(
            accepted_prediction_tokens=details.accepted_prediction_tokens,
            rejected_prediction_tokens=details.rejected_prediction_tokens,
            reasoning_tokens=details.reasoning_tokens,
        ),
        total_tokens=usage.total_tokens,
    )
