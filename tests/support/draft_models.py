"""Proposers with a draft model, and requests for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.kv.cache import KvCache
from loraplex.engine.kv.groups import one_group
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.speculation.draft_model import DraftModelProposer
from loraplex.engine.speculation.drawing import CoupledDrawing

BLOCK_SIZE = 4


def make_proposer(
    model: BaseModel, kind: type[DraftModelProposer] = DraftModelProposer, **changes: Any
) -> DraftModelProposer:
    num_blocks, block_size = changes.pop("num_blocks", 200), changes.pop("block_size", BLOCK_SIZE)
    pages = KvCache(
        one_group(len(model.kv_shapes), num_blocks + 1),
        model.kv_shapes,
        block_size=block_size,
        kv_format=model.kv_format,
        device=model.device,
    )
    settings: dict[str, Any] = {
        "pages": pages,
        "drawing": CoupledDrawing(),
        "ends": lambda request, token: False,
        "prefix_secret": b"secret",
        **changes,
    }
    return kind(model, **settings)


def make_request(
    name: str,
    prompt: Sequence[int],
    *,
    tenant_id: str = "acme",
    adapter: AdapterKey | None = None,
    **sampling: Any,
) -> Request:
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    submitted = GenerationRequest(name, tenant_id, list(prompt), params, adapter)
    return Request(
        submitted=submitted,
        namespace=CacheNamespace(tenant_id, "runtime", adapter),
        seed=params.seed or 0,
        arrival_time=0.0,
        adapter_tier=None,
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]
