"""transformers and PEFT as a peer of `bench_peers`: a process that generates in static batches.

A batch is as many requests as are to run at a time; its sequences begin together and end together.
Adapters are mixed with `adapter_names`. A batch of one adapter, or of the base alone, goes PEFT's
quicker way: the adapter is set, or all are disabled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import IO, Any

import msgspec
import torch
from benchmarks.peers import BASE, PeerFailed, Setup, tail

from loraplex.api.bench.summary import RequestTiming, Run
from loraplex.api.bench.workload import LoadRequest, Workload, load_requests

NAME = "peft"
READY = "ready"


class Peft:
    """Starts the process."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    @contextmanager
    def running(self) -> Iterator[PeftProcess]:
        setup = self._setup
        files = [str(path) for path in (setup.base, *setup.adapters)]
        command = [sys.executable, "-P", "-m", "benchmarks.peft_peer", setup.dtype, *files]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with setup.log(NAME).open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        with process:
            try:
                peer = PeftProcess(process, len(setup.adapters), setup.log(NAME))
                assert peer.answer() == READY
                yield peer
            finally:
                process.kill()


class PeftProcess:
    """The parent's side: a line for each workload, answered by a line for its run."""

    def __init__(self, process: subprocess.Popen[str], num_adapters: int, log: Path) -> None:
        self._process = process
        self._log = log
        self.adapters = adapter_names(num_adapters)

    def run(self, workload: Workload) -> Run:
        assert self._process.stdin is not None
        self._process.stdin.write(encode_workload(workload) + "\n")
        self._process.stdin.flush()
        return msgspec.convert(self.answer(), Run)

    def answer(self) -> Any:
        """The next line's. Raises `PeerFailed` if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(f"the process with PEFT has ended\n{tail(self._log)}")
        return json.loads(line)


def encode_workload(workload: Workload) -> str:
    """As one line of JSON."""
    ids = workload.token_ids
    return json.dumps({**asdict(workload), "token_ids": [ids.start, ids.stop]})


def decode_workload(line: str) -> Workload:
    """What `encode_workload` encoded."""
    fields = json.loads(line)
    return Workload(**{**fields, "token_ids": range(*fields["token_ids"])})


def adapter_names(num_adapters: int) -> list[str]:
    """The names in requests."""
    return [f"adapter-{index}" for index in range(num_adapters)]


class StepTimes:
    """A streamer for `generate` that notes when each step's tokens are there."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def put(self, value: object) -> None:
        self._times.append(perf_counter())

    def end(self) -> None:
        """Nothing is left to note."""

    @property
    def chunks(self) -> tuple[float, ...]:
        """One time for each output token: the first call was about the prompts."""
        return tuple(self._times[1:])


def load_model(dtype: str, base: str, adapters: Sequence[str]) -> Any:
    """The base with all adapters, in this dtype, which is never told to stop early."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    # Otherwise PEFT keeps adapters in fp32 beside a base in bf16, and converts in every layer.
    as_served = {"autocast_adapter_dtype": False}
    first, *others = zip(adapter_names(len(adapters)), adapters, strict=True)
    served = PeftModel.from_pretrained(model, first[1], adapter_name=first[0], **as_served)
    for name, folder in others:
        served.load_adapter(folder, adapter_name=name, **as_served)
    return served.eval()


def run_batches(model: Any, workload: Workload) -> Run:
    """One static batch after another."""
    requests, size = load_requests(workload), workload.concurrency
    began = perf_counter()
    timings = [
        timing
        for first in range(0, len(requests), size)
        for timing in generate(model, requests[first : first + size])
    ]
    return Run(timings=tuple(timings), wall_seconds=perf_counter() - began)


def generate(model: Any, requests: Sequence[LoadRequest]) -> list[RequestTiming]:
    """One batch; all its requests are sent when it begins."""
    prompts = torch.tensor([request.prompt for request in requests])
    (num_tokens,) = {request.output_tokens for request in requests}
    times = StepTimes()
    sent = perf_counter()
    context, options = _adapters_of(model, [request.model for request in requests])
    with context:
        model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_tokens,
            do_sample=False,
            streamer=times,
            **options,
        )
    assert len(times.chunks) == num_tokens
    return [RequestTiming(sent, times.chunks, num_tokens) for _ in requests]


def _adapters_of(
    model: Any, names: Sequence[str]
) -> tuple[AbstractContextManager[None], dict[str, Any]]:
    """The block in which this batch runs, and options of `generate`."""
    if set(names) == {BASE}:
        return model.disable_adapter(), {}
    if len(set(names)) > 1:
        return nullcontext(), {"adapter_names": list(names)}
    model.set_adapter(names[0])
    return nullcontext(), {}


def serve(model: Any, workloads: IO[str], runs: IO[str]) -> None:
    """The process's side, until there are no more workloads."""
    print(json.dumps(READY), file=runs, flush=True)
    for line in workloads:
        run = run_batches(model, decode_workload(line))
        print(msgspec.json.encode(run).decode(), file=runs, flush=True)


if __name__ == "__main__":
    # Libraries print to standard output; the runs go where it led.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(load_model(sys.argv[1], sys.argv[2], sys.argv[3:]), sys.stdin, answers)
