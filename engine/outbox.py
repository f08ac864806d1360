"""Outgoing messages and request events, until the caller takes them."""

from __future__ import annotations

from .messages import FromEngine, StepEvents


class Outbox:
    """Collects messages in order. The events of all requests follow them in one message."""

    def __init__(self) -> None:
        self.events = StepEvents()
        """Events since the last `take`. Callers append to its lists."""
        self._messages: list[FromEngine] = []

    @property
    def is_empty(self) -> bool:
        return not (self._messages or self._has_events)

    def add(self, message: FromEngine) -> None:
        self._messages.append(message)

    def take(self) -> list[FromEngine]:
        """Return what was collected since the last call."""
        messages, self._messages = self._messages, []
        if self._has_events:
            messages.append(self.events)
            self.events = StepEvents()
        return messages

    @property
    def _has_events(self) -> bool:
        events = self.events
        return bool(events.started or events.prompts or events.tokens or events.finished)
