"""Requests that run only while no other request is in the engine. Torch-free."""

from __future__ import annotations

from ..request import Request


class BackgroundRequests:
    """The background requests that have not ended, and which of them stand back.

    One that stands back is neither queued nor running: no step takes it.
    """

    def __init__(self) -> None:
        self.requests: dict[Request, None] = {}
        """In the order of arrival. Nobody else changes it."""
        self._back: set[Request] = set()

    def __contains__(self, request: object) -> bool:
        return request in self.requests

    @property
    def num_back(self) -> int:
        """How many stand back."""
        return len(self._back)

    def is_back(self, request: Request) -> bool:
        return request in self._back

    def add(self, request: Request) -> None:
        """A request that stands back until it is brought forward."""
        self.requests[request] = None
        self._back.add(request)

    def remove(self, request: Request) -> None:
        del self.requests[request]
        self._back.discard(request)

    def forward(self) -> list[Request]:
        """Bring all forward; returns those that stood back, in the order of arrival."""
        brought = [request for request in self.requests if request in self._back]
        self._back.clear()
        return brought

    def in_front(self) -> list[Request]:
        """Those that do not stand back, in the order of arrival."""
        return [request for request in self.requests if request not in self._back]

    def step_back(self, request: Request) -> None:
        self._back.add(request)
