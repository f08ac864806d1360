"""Background load: pushes of adapters, and requests with schemas."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx

from loraplex.api.client.errors import ClientError
from support.server import Caller

PAUSE_SECONDS = 0.05
LAST_ACT_SECONDS = 180.0


@dataclass
class Pushes:
    """What became of them."""

    ready: dict[str, Path] = field(default_factory=dict)
    """By name, which folder it is."""
    failed: Counter[str] = field(default_factory=Counter)


@dataclass
class Checks:
    """What became of requests with a schema."""

    num_answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)


@contextmanager
def pushing(caller: Caller, *folders: Path) -> Iterator[Pushes]:
    """Push these adapters by turns under ever new names, one at a time, until the block is left."""
    pushes, numbers = Pushes(), count()

    def push() -> None:
        number = next(numbers)
        name, folder = f"pushed-{number}", folders[number % len(folders)]
        try:
            caller.push(folder, name)
            pushes.ready[name] = folder
        except ClientError as exc:
            pushes.failed[exc.code] += 1

    with repeating(push):
        yield pushes


@contextmanager
def checking(caller: Caller, model: str) -> Iterator[Checks]:
    """Send ever new schemas, one at a time, until the block is left."""
    checks, numbers = Checks(), count()

    def ask() -> None:
        properties = {f"field_{next(numbers)}": {"enum": ["yes", "no"]}}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 5,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema},
            },
        }
        with suppress(httpx.TransportError):
            answer = caller.http.post("/v1/chat/completions", json=body)
            if answer.is_success:
                checks.num_answered += 1
            else:
                checks.failed[answer.json()["error"]["code"]] += 1

    with repeating(ask):
        yield checks


@contextmanager
def repeating(act: Callable[[], None]) -> Iterator[None]:
    """Act again and again in a thread until the block is left; fails if the last act never ends."""
    is_over = threading.Event()

    def act_on() -> None:
        while not is_over.wait(PAUSE_SECONDS):
            act()

    thread = threading.Thread(target=act_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(LAST_ACT_SECONDS)
    assert not thread.is_alive(), f"what was asked last has no end after {LAST_ACT_SECONDS} s"
