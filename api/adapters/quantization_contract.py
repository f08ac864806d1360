"""Measures, per adapter, how far the served base deviates from the unquantized base.

With `--reference-base`, every new version runs the probe prompts on both. The served base may be
quantized while it is loaded, or its checkpoint is quantized already. A separate process loads
the reference base for the duration of the measurement; the engine never waits for it. A failed
measurement reports the reason and does not delay the version.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...adapters.errors import AdapterError
from ...adapters.fetcher import FetchedBlock
from ...adapters.identity import AdapterKey
from ...adapters.niceness import yield_processor
from ...engine.checkpoint.base_config import read_config_file
from ...engine.checkpoint.base_identity import compute_base_id
from ...engine.checkpoint.packed_format import find_packed_format
from ...engine.process.engine_process import engine_environment
from ...engine.process.reference_base import ReferenceRequest
from ...platform.errors import InvalidValue, PlatformError
from .probes import Logits, kl_divergence

NOT_MEASURED = "not measured"
DRIFTED = "quantization_drift"
MEASURE_SECONDS = 900.0
"""Time for fetching the block, loading the reference and running it."""
MAX_REASON_CHARACTERS = 300
_SIZES = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)
"""Settings in which a base and its quantized checkpoint are alike."""
REFERENCE_COMMAND = (sys.executable, "-P", "-m", "loraplex.engine.process.reference_base")


class NotMeasured(Exception):
    """The reference could not be measured; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The served base against the reference under one adapter, over the probe prompts."""

    kl: tuple[float, ...]
    """KL(reference ‖ served) of the token after each prompt, in nats."""
    kl_mean: float
    kl_max: float
    top_token_changed: int
    """The number of prompts whose most probable token differs."""
    num_probes: int
    limit: float | None
    """The operator's limit of `kl_max`."""

    @property
    def is_within_limit(self) -> bool:
        return self.limit is None or self.kl_max <= self.limit

    def as_report(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sentence(self) -> str:
        """The message for the pusher of a version that drifts too far."""
        return (
            "With this adapter, the quantized base differs from the unquantized one by a KL "
            f"of {self.kl_max:.3g}; this server allows {self.limit:.3g}. Push it to a server "
            "of the unquantized base, lower alpha, or train on the quantized base; the "
            "operator may raise --max-reference-kl."
        )


def compare_with_reference(
    reference: Sequence[Logits], served: Sequence[Logits], *, limit: float | None
) -> Drift:
    """Both have one `[vocab_size]` per prompt."""
    pairs = list(zip(reference, served, strict=True))
    divergences = [kl_divergence(one, other) for one, other in pairs]
    return Drift(
        kl=tuple(divergences),
        kl_mean=sum(divergences) / len(divergences),
        kl_max=max(divergences),
        top_token_changed=sum(bool(one.argmax() != other.argmax()) for one, other in pairs),
        num_probes=len(pairs),
        limit=limit,
    )


class QuantizationContract:
    """Measures drift, one adapter at a time."""

    def __init__(
        self,
        *,
        reference_dir: Path,
        reference_id: str,
        base_id: str,
        prompts: Sequence[list[int]],
        fetch: Callable[[AdapterKey], Awaitable[FetchedBlock]],
        limit: float | None,
        num_threads: int | None,
        measure_seconds: float = MEASURE_SECONDS,
        command: Sequence[str] = REFERENCE_COMMAND,
    ) -> None:
        """`reference_id`: the base id of that folder. `base_id`: the served one. `fetch` fetches an
        adapter's block to the local disk. `limit`: the largest accepted KL divergence."""
        self._reference_dir = reference_dir
        self._reference_id = reference_id
        self._base_id = base_id
        self._prompts = list(prompts)
        self._fetch = fetch
        self._limit = limit
        self._num_threads = num_threads
        self._measure_seconds = measure_seconds
        self._command = command
        self._turn = asyncio.Lock()  # memory for one reference, not for two

    async def measure(self, key: AdapterKey, served: Sequence[Logits]) -> Drift:
        """Compare the served logits of the probe prompts, in their order, with the reference's.

        Raises NotMeasured.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(self._measure_seconds):
                    block = await self._fetch(key)
                    answer = await self._ask(self._request(block.path))
            except TimeoutError as exc:
                raise NotMeasured(f"it took longer than {self._measure_seconds:g} s") from exc
            except (AdapterError, PlatformError, OSError) as exc:
                raise NotMeasured(str(exc)) from exc
        return self._compare(answer, served)

    def _request(self, block: Path) -> ReferenceRequest:
        return ReferenceRequest(
            model=str(self._reference_dir),
            model_id=self._reference_id,
            base_id=self._base_id,
            block_path=str(block),
            prompts=self._prompts,
            num_threads=self._num_threads,
        )

    async def _ask(self, request: ReferenceRequest) -> bytes:
        """The child's answer. The child has ended when this returns or raises. Raises
        NotMeasured."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            request.to_json(),
            stdin=asyncio.subprocess.PIPE,  # its end tells the child that the server is gone
            stdout=asyncio.subprocess.PIPE,
            env=engine_environment(os.environ),
            start_new_session=True,
        )
        yield_processor(process.pid)  # serving has priority over measuring
        assert process.stdout is not None
        try:
            answer = await process.stdout.read()
            status = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if status == 1 and answer:
            raise NotMeasured(answer.decode(errors="replace")[:MAX_REASON_CHARACTERS])
        if status != 0:
            raise NotMeasured(f"the reference process ended with status {status}")
        return answer

    def _compare(self, answer: bytes, served: Sequence[Logits]) -> Drift:
        sizes = {len(logits) for logits in served}
        vocab_size = sizes.pop()
        width, rest = divmod(len(answer), 4 * len(served))
        if sizes or rest or width < vocab_size:
            raise NotMeasured("the reference process gave no whole answer")
        # Beyond are the tokens that the base or the adapter does not have.
        reference = np.frombuffer(answer, np.float32).reshape(-1, width)[:, :vocab_size]
        if not np.isfinite(reference).all():
            raise NotMeasured("the reference's own output is not finite")
        return compare_with_reference(list(reference), served, limit=self._limit)


def check_reference(reference_dir: Path, served_dir: Path, base_id: str) -> str:
    """The base id of the reference. Reads all its files.

    base_id: the served one. Raises InvalidValue unless the folder holds an unquantized base: the
    served one, or one of the same sizes if the served checkpoint is quantized.
    """
    if form := find_packed_format(reference_dir):
        raise _not_the_reference(f"{reference_dir} is quantized itself: {form}")
    found = compute_base_id(reference_dir)
    if found == base_id:
        return found
    if find_packed_format(served_dir) is None:
        raise _not_the_reference(
            f"{reference_dir} holds another model or tokenizer ({found}) than the one that is "
            f"served ({base_id})"
        )
    reference, served = read_config_file(reference_dir), read_config_file(served_dir)
    for name in _SIZES:
        if name in reference and name in served and reference[name] != served[name]:
            raise _not_the_reference(
                f"{reference_dir} holds another model than the one that is served: its {name} is "
                f"{reference[name]}, not {served[name]}"
            )
    return found


def _not_the_reference(reason: str) -> InvalidValue:
    return InvalidValue(f"--reference-base {reason}.", param="reference_base")
