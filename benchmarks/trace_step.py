"""The functions that one decode step calls: message in → schedule → run → process → events out.

    make trace-step          ARGS="--json -": one JSON object on standard output; or a file

Requests of the base and of adapters of two tenants decode together on a tiny base. Traced are
`EngineCore.handle` on the last request's message, and one `EngineCore.step` once all of them
decode. The steps between, which compute the prompts, are not traced. A function of `loraplex`
counts once, by its file and qualified name; comprehensions and generator expressions do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, Self

from benchmarks.timed_engine import SMOKE_SHAPE, make_model

from loraplex.adapters.identity import AdapterKey
from loraplex.api.bench.models import make_adapter
from loraplex.engine import core
from loraplex.engine.messages import GenerationRequest, Submit
from loraplex.engine.sampling_params import SamplingParams
from support.engine import LocalEngine

MAX_FUNCTIONS, MAX_FILES = 128, 25
RANKS = {"acme": (4, 8), "bolt": (8, 16)}
"""Of the adapters of each tenant."""
NUM_STEADY_STEPS = 3
"""Decode steps of all requests before the traced one; no KV block is full by then."""
CLOCK_SECONDS = 1e-6
"""How far the clock goes each time it is read: statistics and reaping are not due in the step."""
_PACKAGE = Path(core.__file__).parents[1]
_ANONYMOUS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


class Trace:
    """The functions of `loraplex` that this thread calls within its blocks."""

    def __init__(self) -> None:
        self.by_file: dict[str, list[str]] = {}
        """Qualified names by path in the package; both in the order of their first call."""

    def report(self) -> dict[str, Any]:
        functions, files = sum(map(len, self.by_file.values())), len(self.by_file)
        return {
            "functions": functions,
            "files": files,
            "is_within_bar": functions <= MAX_FUNCTIONS and files <= MAX_FILES,
            "by_file": self.by_file,
        }

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event != "call" or code.co_name in _ANONYMOUS or not path.is_relative_to(_PACKAGE):
            return
        names = self.by_file.setdefault(str(path.relative_to(_PACKAGE)), [])
        if code.co_qualname not in names:
            names.append(code.co_qualname)


def trace_step(home: Path) -> Trace:
    """Trace one message and one decode step of requests under all adapters and under none."""
    clock = count(step=CLOCK_SECONDS).__next__
    base = make_model(home, SMOKE_SHAPE)
    engine = LocalEngine(base, home, dtype="float32", clock=clock)
    messages = [_message(number, key) for number, key in enumerate([None, *_load(engine, home)])]
    trace = Trace()
    for message in messages[:-1]:
        engine.core.handle(message)
    with trace:
        engine.core.handle(messages[-1])
    ids = [message.request.request_id for message in messages]
    while not all(engine.tokens(ids)):
        engine.step()
    for _ in range(NUM_STEADY_STEPS):
        engine.step()
    lengths = list(map(len, engine.tokens(ids)))
    with trace:
        engine.step()
    assert list(map(len, engine.tokens(ids))) == [length + 1 for length in lengths]
    engine.close()
    return trace


def _load(engine: LocalEngine, home: Path) -> list[AdapterKey]:
    """Adapters of every tenant, resident."""
    keys: list[AdapterKey] = []
    for tenant_id, ranks in RANKS.items():
        for rank in ranks:
            folder = home / f"{tenant_id}-{rank}"
            make_adapter(folder, SMOKE_SHAPE, rank=rank, seed=len(keys))
            keys.append(engine.add_adapter(folder, tenant_id))
            engine.generate([5, 6, 7], keys[-1])
    return keys


def _message(number: int, adapter: AdapterKey | None) -> Submit:
    """A request with a prompt of its own length."""
    tenant_id = adapter.tenant_id if adapter else "acme"
    sampling = SamplingParams(max_tokens=32, seed=number, ignore_eos=True)
    prompt = list(range(10, 15 + number))
    return Submit(GenerationRequest(f"traced-{number}", tenant_id, prompt, sampling, adapter))


def as_text(report: dict[str, Any]) -> str:
    verdict = "holds" if report["is_within_bar"] else "is missed"
    counts = f"{report['functions']} functions in {report['files']} files"
    lines = [f"{counts}; the bar of {MAX_FUNCTIONS} in {MAX_FILES} {verdict}"]
    for path, names in report["by_file"].items():
        lines += ["", f"{path}  ({len(names)})", *(f"    {name}" for name in names)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write JSON to this file; - prints it alone")
    target: Path | None = parser.parse_args(arguments).json
    with tempfile.TemporaryDirectory() as home:
        report = trace_step(Path(home)).report()
    is_alone = target == Path("-")
    print(json.dumps(report) if is_alone else as_text(report))
    if target and not is_alone:
        target.write_text(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
