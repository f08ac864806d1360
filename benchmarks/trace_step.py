"""The functions that one steady decode step calls: schedule → run → process → events out.

    make trace-step          ARGS="--json -": one JSON object on standard output; or a file

Requests of the base and of adapters of two tenants decode together on a tiny base. Traced is one
`EngineCore.step` once all of them decode; the bar is for it. The model's layers are transformers'
own, as on a machine without a compiler. What the CPU's library adds to such a step is listed after
it, and so is what `EngineCore.handle` on the last request's message calls besides. A function of
`loraplex` counts once, by its file and qualified name; comprehensions and generator expressions do
not count.
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

import pytest
from benchmarks.timed_engine import SMOKE_SHAPE, make_model

from loraplex.adapters.identity import AdapterKey
from loraplex.api.bench.models import make_adapter
from loraplex.engine import core
from loraplex.engine.messages import GenerationRequest, Submit
from loraplex.engine.sampling_params import SamplingParams
from support.cpu_kernels import remove_cpu_library
from support.engine import LocalEngine
from support.fused import own_rotary_afterwards, restore_rotary

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

    @property
    def num_functions(self) -> int:
        return sum(map(len, self.by_file.values()))

    def without(self, other: Trace) -> Trace:
        """What is called here and not there."""
        rest = Trace()
        for path, names in self.by_file.items():
            if only := [name for name in names if name not in other.by_file.get(path, ())]:
                rest.by_file[path] = only
        return rest

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


def trace_step(home: Path) -> tuple[Trace, Trace]:
    """Trace one decode step of requests under all adapters and under none, and one message."""
    home.mkdir()
    clock = count(step=CLOCK_SECONDS).__next__
    base = make_model(home, SMOKE_SHAPE)
    engine = LocalEngine(base, home, dtype="float32", clock=clock)
    messages = [_message(number, key) for number, key in enumerate([None, *_load(engine, home)])]
    step, submission = Trace(), Trace()
    for message in messages[:-1]:
        engine.core.handle(message)
    with submission:
        engine.core.handle(messages[-1])
    ids = [message.request.request_id for message in messages]
    while not all(engine.tokens(ids)):
        engine.step()
    for _ in range(NUM_STEADY_STEPS):
        engine.step()
    lengths = list(map(len, engine.tokens(ids)))
    with step:
        engine.step()
    assert list(map(len, engine.tokens(ids))) == [length + 1 for length in lengths]
    engine.close()
    return step, submission


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


def trace_all(home: Path) -> tuple[Trace, Trace, Trace]:
    """The step and the message without the CPU's library, and the step with it."""
    restore_rotary()  # what ran before in this process may have left the library's
    with pytest.MonkeyPatch.context() as patch:
        remove_cpu_library(patch)
        step, submission = trace_step(home / "plain")
    with own_rotary_afterwards():
        return step, submission, trace_step(home / "library")[0]


def report(step: Trace, submission: Trace, library: Trace) -> dict[str, Any]:
    functions, files = step.num_functions, len(step.by_file)
    return {
        "functions": functions,
        "files": files,
        "is_within_bar": functions <= MAX_FUNCTIONS and files <= MAX_FILES,
        "by_file": step.by_file,
        "library": library.without(step).by_file,
        "submission": submission.without(step).by_file,
    }


def as_text(step: Trace, submission: Trace, library: Trace) -> str:
    verdict = "holds" if report(step, submission, library)["is_within_bar"] else "is missed"
    counts = f"{step.num_functions} functions in {len(step.by_file)} files"
    rest, added = submission.without(step), library.without(step)
    return "\n".join(
        [
            f"One decode step: {counts}; the bar of {MAX_FUNCTIONS} in {MAX_FILES} {verdict}",
            *_listed(step),
            "",
            f"With the CPU's library: {added.num_functions} in {len(added.by_file)} files",
            *_listed(added),
            "",
            f"Besides, the message of a new request: {rest.num_functions} functions",
            *_listed(rest),
        ]
    )


def _listed(trace: Trace) -> list[str]:
    lines: list[str] = []
    for path, names in trace.by_file.items():
        lines += ["", f"{path}  ({len(names)})", *(f"    {name}" for name in names)]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write JSON to this file; - prints it alone")
    target: Path | None = parser.parse_args(arguments).json
    with tempfile.TemporaryDirectory() as home:
        traces = trace_all(Path(home))
    is_alone = target == Path("-")
    print(json.dumps(report(*traces)) if is_alone else as_text(*traces))
    if target and not is_alone:
        target.write_text(json.dumps(report(*traces)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
