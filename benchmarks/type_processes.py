"""One process for each model type, forked from this one, with a time limit."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch
from transformers.utils import logging as transformers_logging

Result = TypeVar("Result")

SECONDS_PER_TYPE = 120.0
NUM_WORKERS = 2
NO_ANSWER = f"its process died, or gave no answer in {SECONDS_PER_TYPE:.0f} s"


def each_in_a_process(
    model_types: Sequence[str], call: Callable[[str], Result]
) -> Iterator[tuple[str, Result | None]]:
    """Each type and what `call` returns for it, as they come, `NUM_WORKERS` types at a time.

    None where the process died or gave no answer in `SECONDS_PER_TYPE`.
    """
    _warm_up(call)
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(model_types))
    running: dict[Connection, tuple[str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < NUM_WORKERS:
            model_type = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_report, args=(call, model_type, theirs), daemon=True)
            process.start()
            theirs.close()
            running[ours] = (model_type, process, time.monotonic() + SECONDS_PER_TYPE)
        wait(list(running), timeout=1.0)
        for connection in list(running):
            model_type, process, deadline = running[connection]
            if connection.poll() or time.monotonic() > deadline:
                result = _received(connection)
                process.kill()
                process.join()
                del running[connection]
                yield model_type, result


def _received(connection: Connection) -> Any:
    try:
        return connection.recv() if connection.poll() else None
    except EOFError:
        return None


def _warm_up(call: Callable[[str], object]) -> None:
    """Import what every type needs, and keep this process without threads: it is forked."""
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    call("llama")


def _report(call: Callable[[str], object], model_type: str, connection: Connection) -> None:
    connection.send(call(model_type))
