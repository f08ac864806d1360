"""Opens the proposer of a draft model, over a cache of its own."""

from __future__ import annotations

import secrets

from ..checkpoint.files import DRAFT
from ..config import EngineConfig
from ..execution.decode_graphs import open_decode_graphs, serves_graphs
from ..kv.cache import KvCache
from ..kv.groups import one_group
from ..model.base_model import BaseModel
from .draft_model import DraftModelProposer
from .draft_model_tree import DraftModelTreeProposer
from .drawing import make_drawing


def open_draft_model(
    config: EngineConfig, draft: BaseModel | None, *, num_blocks: int, max_model_len: int
) -> DraftModelProposer | None:
    """The proposer of `draft`, if there is one, with `num_blocks` blocks of cache, for requests of
    up to `max_model_len` tokens."""
    if draft is None:
        return None
    kind = DraftModelProposer if DRAFT in config.proposers else DraftModelTreeProposer
    pages = KvCache(
        one_group(len(draft.kv_shapes), num_blocks + 1),
        draft.kv_shapes,
        block_size=config.kv_block_size,
        kv_format=draft.kv_format,
        device=draft.device,
        has_spare_blocks=serves_graphs(config, draft),
    )
    longest = min(max_model_len, draft.max_model_len)
    return kind(
        draft,
        pages=pages,
        graphs=open_decode_graphs(config, draft, pages, max_model_len=longest),
        drawing=make_drawing(config.acceptance),
        ends=lambda request, token: token in request.end_token_ids,
        prefix_secret=secrets.token_bytes(32) if config.prefix_caching else None,
    )
