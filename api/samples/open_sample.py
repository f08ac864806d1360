"""A request of which a sample is to be kept, until its answer is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
import structlog

from ...platform.adapters.registry import AdapterRef
from ...platform.base import utc_now
from ...platform.samples.service import NewSample
from .content import Content

log = structlog.get_logger(__name__)

STOP = "stop"


class Counts(Protocol):
    """The tokens of a generation."""

    num_prompt_tokens: int
    num_completion_tokens: int


class OpenSample:
    """Keeps the answer. Nothing in here fails the request."""

    def __init__(
        self,
        request_id: str,
        adapter: AdapterRef,
        content: Content,
        keep: Callable[[NewSample], None],
    ) -> None:
        """`keep` gets the sample at the end."""
        self._request_id = request_id
        self._adapter = adapter
        self._content = content
        self._keep = keep

    def complete(self, text: str, finish_reason: str, counts: Counts) -> None:
        """The answer is complete, and ended as `stop` or `length`."""
        try:
            self._keep(self._sample(text, finish_reason, counts))
        except Exception as exc:  # without the traceback, whose values may be the tenant's text
            log.error("sample_failed", request_id=self._request_id, error=type(exc).__name__)

    def _sample(self, text: str, finish_reason: str, counts: Counts) -> NewSample:
        answered = self._content.answered(text)
        has_called = answered.has_calls and finish_reason == STOP
        return NewSample(
            adapter_id=self._adapter.adapter_id,
            version_number=self._adapter.version,
            request_id=self._request_id,
            kind=self._content.kind,
            finish_reason="tool_calls" if has_called else finish_reason,
            prompt_tokens=counts.num_prompt_tokens,
            completion_tokens=counts.num_completion_tokens,
            created_at=utc_now(),
            content=msgspec.json.encode(answered.content),
        )
