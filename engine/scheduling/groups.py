"""Requests with the same prompt: one computes it, the others go on from its blocks. Torch-free."""

from __future__ import annotations

from collections.abc import Container

from ..kv.prefix_cache import CacheNamespace
from ..request import Request


class Groups:
    """The requests of each group that have not ended.

    The request that computes the prompt is not stored: it is the running one of the group that has
    not reached its prompt's last token. So any of them may be aborted or preempted.
    """

    def __init__(self, running: Container[Request]) -> None:
        self._running = running
        self._members: dict[tuple[CacheNamespace, str], dict[Request, None]] = {}

    def add(self, request: Request) -> None:
        if key := _key(request):
            self._members.setdefault(key, {})[request] = None

    def remove(self, request: Request) -> None:
        if (key := _key(request)) and (members := self._members.get(key)):
            members.pop(request, None)
            if not members:
                del self._members[key]

    def awaits_prompt(self, request: Request) -> bool:
        """Whether another of the group is computing the prompt: waiting is cheaper."""
        return any(
            other.num_computed_tokens < other.num_prompt_tokens - 1
            for other in self._others(request)
        )

    def parent(self, request: Request) -> Request | None:
        """One of the group that has computed the prompt, but for its last token at least."""
        for other in self._others(request):
            if other.num_computed_tokens >= max(other.num_prompt_tokens - 1, 1):
                return other
        return None

    def _others(self, request: Request) -> list[Request]:
        """Those that run and indeed have the same prompt; none for one that reads its prompt."""
        key = _key(request)
        if key is None or not request.num_reusable_tokens:
            return []
        prompt = request.submitted.prompt_token_ids
        return [
            other
            for other in self._members.get(key, ())
            if other is not request
            and other in self._running
            and other.submitted.prompt_token_ids == prompt
        ]


def _key(request: Request) -> tuple[CacheNamespace, str] | None:
    group_id = request.submitted.group_id
    return None if group_id is None else (request.namespace, group_id)
