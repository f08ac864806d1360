"""What others do while requests run: push adapters, and ask for answers that follow schemas."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx

from loraplex.api.cli.client import ApiRefused
from loraplex.api.cli.exit_codes import CommandFailed
from support.server import Caller

PAUSE_SECONDS = 0.05


@dataclass
class Pushes:
    """What became of them."""

    ready: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)


@dataclass
class Checks:
    """What became of requests with a schema."""

    num_answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)


@contextmanager
def pushing(caller: Caller, folder: Path) -> Iterator[Pushes]:
    """Push one adapter under ever new names, one push at a time, until the block is left."""
    pushes, numbers = Pushes(), count()

    def push() -> None:
        name = f"pushed-{next(numbers)}"
        try:
            caller.push(folder, name)
            pushes.ready.append(name)
        except ApiRefused as exc:
            pushes.failed[exc.code or "unknown"] += 1
        except CommandFailed as exc:
            pushes.failed[type(exc).__name__] += 1

    with _repeating(push):
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

    with _repeating(ask):
        yield checks


@contextmanager
def _repeating(act: Callable[[], None]) -> Iterator[None]:
    """Act again and again in a thread until the block is left."""
    is_over = threading.Event()

    def act_on() -> None:
        while not is_over.wait(PAUSE_SECONDS):
            act()

    thread = threading.Thread(target=act_on)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
