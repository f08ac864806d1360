"""Opens the proposers that draft with a cheaper form of the base."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..config import PROPOSERS, TREE_PROPOSERS, EngineConfig, source_of
from ..execution.runner import ModelRunner
from ..model.base_model import BaseModel
from ..model.drafting_part import DraftingPart
from ..model.layer_subset import EARLY_EXIT, SKIP, open_subset
from ..model.rounded_linears import QUANTIZED, RoundedLinears
from .drawing import make_drawing
from .self_draft import SelfDraftProposer
from .self_draft_tree import SelfDraftTreeProposer


def open_self_draft(
    name: str, _argument: str, config: EngineConfig, base: BaseModel, runner: ModelRunner
) -> SelfDraftProposer:
    """The argument is read from the configuration. Raises InvalidParameter or UnsupportedModel."""
    is_rounded = source_of(name) == QUANTIZED
    part: DraftingPart = RoundedLinears(base) if is_rounded else open_subset(name, config, base)
    kind = SelfDraftTreeProposer if name in TREE_PROPOSERS else SelfDraftProposer
    return kind(name, part, runner, make_drawing(config.acceptance))


SELF_DRAFT_OPENERS: dict[str, Callable[..., SelfDraftProposer]] = {
    name: partial(open_self_draft, name)
    for name in PROPOSERS
    if source_of(name) in (EARLY_EXIT, SKIP, QUANTIZED)
}
"""By name."""
