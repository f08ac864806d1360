"""Runs the unquantized base with one adapter, for comparison.

`python -m loraplex.engine.process.reference_base` runs it.

The process exists only while it measures. It takes one argument, a `ReferenceRequest` as JSON. With
status 0, it writes the logits of each prompt's next token, `float32 [num_prompts, vocab_size]`, to
standard output; with status 1, a sentence with the reason of the failure. The engine's own code
applies the adapter from its canonical block; only the base's number format differs from what is
served. Like the engine, the process ends with its parent.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ...adapters.block import BlockHeader, read_block_header
from ...adapters.errors import AdapterError
from ...adapters.identity import AdapterKey
from ...adapters.logs import log_to_stderr
from ...adapters.manager import Tier
from ..checkpoint.base_identity import compute_base_id
from ..config import EngineConfig
from ..errors import EngineError
from ..lifeline import end_with_parent
from ..messages import (
    AdapterFetched,
    AdapterWanted,
    FromEngine,
    GenerationRequest,
    RequestFinished,
    StepEvents,
    Submit,
    TokensGenerated,
)
from ..sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..core import EngineCore

FIRST_TO_KILL = "1000"
"""Makes the kernel kill this process first when memory runs out, not the server."""
WIDEST_ELEMENT_BYTES = 4
SLACK_BYTES = 8 << 20
LOAD_POLL_SECONDS = 0.002
_TENANT = "reference"
_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class ReferenceRequest:
    """The computation to run."""

    model: str
    """The folder of the unquantized base."""
    model_id: str
    """The expected id of that folder."""
    base_id: str
    """The id of the served base, which is another one if its checkpoint is quantized."""
    block_path: str
    """The adapter's canonical block."""
    prompts: list[list[int]]
    num_threads: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def compute_reference_logits(request: ReferenceRequest) -> list[bytes]:
    """The logits `float32 [vocab_size]` of the token after each prompt, with the adapter.

    Raises EngineError or AdapterError if the base or the block cannot be used.
    """
    from ..core import EngineCore
    from ..parts import open_parts

    block = Path(request.block_path)
    header = read_block_header(block)
    if compute_base_id(Path(request.model)) != request.model_id:
        raise EngineError("the reference base is no longer the one that the server started with")
    core = EngineCore(open_parts(_config(request, header), base_id=request.base_id))
    try:
        return _Questions(core, AdapterKey(_TENANT, header.digest), block).ask(request.prompts)
    finally:
        core.close()


def _config(request: ReferenceRequest, header: BlockHeader) -> EngineConfig:
    """A configuration for the CPU with memory for this adapter and these prompts only."""
    room = 2 * header.num_elements * WIDEST_ELEMENT_BYTES + SLACK_BYTES
    lengths = [len(prompt) + 1 for prompt in request.prompts]
    return EngineConfig(
        model=request.model,
        device="cpu",
        max_model_len=max(lengths),
        max_num_seqs=len(lengths),
        max_num_batched_tokens=sum(lengths) + len(lengths),
        arena_bytes=room,
        host_cache_bytes=room,
        num_threads=request.num_threads,
        prefix_caching=False,
    )


class _Questions:
    """Runs prompts on an engine in this process that serves one adapter."""

    def __init__(self, core: EngineCore, adapter: AdapterKey, block: Path) -> None:
        self._core = core
        self._adapter = adapter
        self._block = block
        self._answers: dict[str, bytes] = {}

    def ask(self, prompts: list[list[int]]) -> list[bytes]:
        """The logits after each prompt. Raises EngineError if one fails."""
        names = [str(number) for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            request = GenerationRequest(
                name, _TENANT, prompt, _SAMPLING, self._adapter, return_logits=True
            )
            self._core.handle(Submit(request))
        while len(self._answers) < len(names):
            messages = self._core.step()
            for message in messages:
                self._take(message)
            if not messages:
                time.sleep(LOAD_POLL_SECONDS)
        return [self._answers[name] for name in names]

    def _take(self, message: FromEngine) -> None:
        match message:
            case AdapterWanted(key):
                self._core.handle(AdapterFetched(key, (str(self._block),), Tier.DISK))
            case StepEvents(tokens=tokens, finished=finished):
                for generated in tokens:
                    self._take_logits(generated)
                for ended in finished:
                    _check(ended)

    def _take_logits(self, generated: TokensGenerated) -> None:
        if generated.logits is not None:
            self._answers[generated.request_id] = generated.logits


def _check(ended: RequestFinished) -> None:
    if ended.error is not None:
        raise EngineError(ended.error.message)


def main() -> int:
    """Measure and write the result; returns the exit status."""
    end_with_parent()
    log_to_stderr()
    os.environ["TQDM_DISABLE"] = "1"
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_KILL)
    with _answer_stream() as answer:
        try:
            request = ReferenceRequest(**json.loads(sys.argv[1]))
            answer.writelines(compute_reference_logits(request))
        except (EngineError, AdapterError, OSError, MemoryError) as exc:
            answer.write((str(exc) or type(exc).__name__).encode())
            return 1
    return 0


def _answer_stream() -> BinaryIO:
    """Standard output for the answer only; output of libraries goes to standard error."""
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answer


if __name__ == "__main__":
    os._exit(main())  # the stream is flushed; threads of libraries are not waited for
