"""Whether an adapter changes the base's logits, by the server's probes."""

from __future__ import annotations

from collections.abc import Sequence

from ...adapters.errors import AdapterRejected
from ...adapters.identity import AdapterKey
from ...engine.messages import GenerationRequest, RequestFinished, TokensGenerated
from ...engine.sampling_params import SamplingParams
from ..adapters.probes import Logits, compare, shared_logits, summarize
from ..contract.errors import from_error_info
from .engine_thread import EngineThread, RequestEvent

CACHE_NAMESPACE = "attestation"
_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def check_effect(engine: EngineThread, key: AdapterKey, prompts: Sequence[list[int]]) -> None:
    """Compare the logits after each prompt with those of the base.

    Raises AdapterRejected with `no_effect`, or ApiError if the probes fail.
    """
    base = _logits(engine, key, prompts, [False] * len(prompts))
    # The base again in a batch with the adapter, because rounding depends on the batch.
    both = _logits(
        engine, key, [*prompts, *prompts], [False] * len(prompts) + [True] * len(prompts)
    )
    again, adapted = both[: len(prompts)], both[len(prompts) :]
    effect = summarize(
        [
            compare(len(prompt), *logits)
            for prompt, *logits in zip(prompts, base, again, adapted, strict=True)
        ]
    )
    if objection := effect.objection:
        raise AdapterRejected("no_effect", objection)


def _logits(
    engine: EngineThread,
    key: AdapterKey,
    prompts: Sequence[list[int]],
    with_adapter: Sequence[bool],
) -> list[Logits]:
    """The logits after each prompt."""
    requests = [
        GenerationRequest(
            request_id=f"probe-{index}",
            tenant_id=key.tenant_id,
            prompt_token_ids=prompt,
            sampling=_SAMPLING,
            adapter=key if has_adapter else None,
            cache_namespace=CACHE_NAMESPACE,
            return_logits=True,
        )
        for index, (prompt, has_adapter) in enumerate(zip(prompts, with_adapter, strict=True))
    ]
    found: dict[str, Logits] = {}

    def take(event: RequestEvent) -> bool:
        if isinstance(event, TokensGenerated) and event.logits is not None:
            found[event.request_id] = shared_logits(event.logits, engine.info.vocab_size)
        if isinstance(event, RequestFinished) and event.error is not None:
            raise from_error_info(event.error)
        return False

    engine.run(requests, take)
    return [found[request.request_id] for request in requests]
