"""The self-test of a base that is divided among the ranks of a group.

Rank 0 computes what the whole base answers, and compares. The other ranks run the same forward
passes in the same order, because each exchanges results.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ..kv.cache import KvFormat
from ..kv.groups import LayerKvShape
from ..shards.group_links import GroupLinks
from .admission import (
    DenseCase,
    Parity,
    SelfTest,
    measure_parity,
    paged_error,
    paged_logits,
    replaces_choices,
    self_test_tokens,
)
from .expert_choices import ReplacedChoices, choosing, of_first_rank, tell_choices


def check_together(
    model: nn.Module,
    config: Any,
    shapes: list[LayerKvShape],
    cases: list[DenseCase],
    bound: float,
    links: GroupLinks,
) -> float:
    """Run the self-test with all ranks; rank 0, which has the cases, compares. Returns its error.

    Raises UnsupportedModel as `check_parity`.
    """
    replaces = replaces_choices(bound)
    choices = _choices_of_stage(cases, links) if replaces and links.stages else None
    with choosing(model, of_first_rank(links.sums)) if replaces else nullcontext():
        if cases:
            parity = measure_parity(model, shapes, cases, bound)
        else:
            dtype = next(model.parameters()).dtype
            _run_along(model, config, shapes, KvFormat(dtype), SelfTest(), choices)
            parity = Parity(0.0, choices.share if choices else 0.0)
    if replaces:
        parity = parity._replace(share=largest_of_group(parity.share, links))
    parity.check(bound)
    return parity.error


def largest_of_group(own: float, links: GroupLinks) -> float:
    """The largest of the values of all ranks of all stages."""
    if links.stages:
        return max(float(told) for told in links.stages.tell_all(repr(own).encode()))
    value = torch.tensor([own], dtype=torch.float64, device=links.sums.device)
    return float(links.sums.largest(value))


def _choices_of_stage(cases: list[DenseCase], links: GroupLinks) -> ReplacedChoices | None:
    """What replaces this stage's choices of experts, as `check_parity` does in the last one; None:
    in the last one."""
    assert links.stages
    recorded = tell_choices([case.choices for case in cases], links.stages)
    return None if links.stages.place.is_last else ReplacedChoices(recorded)


def kv_error_together(
    model: nn.Module,
    config: Any,
    shapes: list[LayerKvShape],
    cases: list[DenseCase],
    kv_format: KvFormat,
    test: SelfTest,
) -> float:
    """The error of a quantized KV cache, on rank 0; 0.0 on the others, and without one."""
    if kv_format.code_dtype is None:
        return 0.0
    if cases:
        return paged_error(model, shapes, cases, kv_format, test.cuts)
    _run_along(model, config, shapes, kv_format, test)
    return 0.0


def _run_along(
    model: nn.Module,
    config: Any,
    shapes: list[LayerKvShape],
    kv_format: KvFormat,
    test: SelfTest,
    choices: ReplacedChoices | None = None,
) -> None:
    """This rank's part of a self-test that rank 0 compares. `choices`: as of `paged_error`."""
    tokens = self_test_tokens(config.vocab_size, test.lengths)
    with choosing(model, choices.choose) if choices else nullcontext():
        for _ in paged_logits(model, shapes, tokens, kv_format, test.cuts, choices=choices):
            pass
