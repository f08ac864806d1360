"""Recurrences of several sequences in one call, against transformers' function of each sequence:
the plain op, the Triton kernels, the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex.kernels.selective_scan import SelectiveScan
from loraplex.kernels.state_rows import StateRows
from support.cpu_kernels import needs_cpu_library
from support.marks import marked_slow
from support.recurrence_cases import (
    Advance,
    Chunk,
    RecurrenceCase,
    check_chunks,
    gated_delta_rule,
    mamba,
    mamba2,
    plain_advance,
    read,
)

MIXED = [Chunk(*chunk) for chunk in ((5, 1), (0, 3), (7, 5), (0, 1), (3, 1), (2, 6))]
"""Decoding, beginnings, and the next chunks of prompts."""
NUM_TOKENS = sum(map(sum, MIXED))
CASES: dict[str, Callable[..., RecurrenceCase]] = {
    "delta rule": lambda *args: gated_delta_rule(*args, num_heads=4),
    "delta rule, not normalized": lambda *args: gated_delta_rule(*args, is_normalized=False),
    "delta rule, odd sizes": lambda *args: gated_delta_rule(
        *args, num_heads=2, key_dim=70, value_dim=37
    ),
    "decay per key": lambda *args: gated_delta_rule(*args, decays_keys=True),
    "mamba2": mamba2,
    "mamba2, plain": lambda *args: mamba2(*args, is_plain=True),
    "mamba2, odd sizes": lambda *args: mamba2(
        *args, num_heads=4, num_groups=2, head_dim=70, state_size=9
    ),
    "mamba": mamba,
    "mamba, plain": lambda *args: mamba(*args, is_plain=True),
    "mamba, odd sizes": lambda *args: mamba(*args, channels=131, size=5),
}
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Of the largest element. transformers reads the selective scan's states in bf16."""
DTYPES = list(ROUNDING)
FORMS = [form for form in product(CASES, DTYPES) if form != ("mamba, plain", torch.bfloat16)]
"""Without D, transformers rounds the outputs of a selective scan."""
INTERPRETED = {("mamba2", torch.bfloat16)} | {
    (name, torch.float32) for name in ("delta rule", "decay per key", "mamba2", "mamba")
}
"""Those that `make test` interprets; the others take seconds."""


def advance(change: Any, states: Tensor, rows: StateRows, after: Tensor) -> Tensor:
    """As it is served on this machine."""
    out = change.advance(states, rows, after)
    assert isinstance(out, Tensor)
    return out


@pytest.fixture
def interpreted_advance(
    interpreted_recurrence: ModuleType, interpreted_selective_scan: ModuleType
) -> Advance:
    def run(change: Any, states: Tensor, rows: StateRows, after: Tensor) -> Tensor:
        is_scan = isinstance(change, SelectiveScan)
        module = interpreted_selective_scan if is_scan else interpreted_recurrence
        out = module.advance(change, states, rows, after)
        assert isinstance(out, Tensor)
        return out

    return run


@pytest.mark.parametrize("name", CASES)
def test_the_definition_is_transformers_function_of_each_sequence(name: str) -> None:
    check_chunks(CASES[name](NUM_TOKENS), MIXED, plain_advance, tolerance=2e-5)


@needs_cpu_library
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_library_computes_transformers_function_of_each_sequence(
    form: tuple[str, torch.dtype],
) -> None:
    name, dtype = form
    case = CASES[name](NUM_TOKENS, dtype)
    check_chunks(case, MIXED, advance, tolerance=ROUNDING[dtype])


@pytest.mark.parametrize("form", marked_slow(FORMS, slow=set(FORMS) - INTERPRETED), ids=str)
def test_the_kernel_computes_transformers_function_of_each_sequence(
    interpreted_advance: Advance, nearest_bf16: None, form: tuple[str, torch.dtype]
) -> None:
    name, dtype = form
    case = CASES[name](NUM_TOKENS, dtype)
    check_chunks(case, MIXED, interpreted_advance, tolerance=ROUNDING[dtype])


def test_the_kernel_computes_one_row_of_one_sequence(interpreted_advance: Advance) -> None:
    for make in (gated_delta_rule, mamba2, mamba):
        check_chunks(make(1), [Chunk(0, 1)], interpreted_advance, tolerance=2e-5)


@pytest.mark.parametrize("make", [gated_delta_rule, mamba2, mamba])
def test_without_the_library_the_definition_serves(
    without_cpu_library: None, make: Callable[..., RecurrenceCase]
) -> None:
    check_chunks(make(NUM_TOKENS), MIXED, advance, tolerance=2e-5)


@needs_cpu_library
# PyTorch computes the steps of whole vectors otherwise than those of the rest: there is no rest.
@pytest.mark.parametrize("make", [gated_delta_rule, mamba2, partial(mamba, channels=32)])
def test_a_row_depends_neither_on_chunks_nor_on_threads_nor_on_other_sequences(
    make: Callable[..., RecurrenceCase],
) -> None:
    case = make(12)
    whole = read(case, slice(0, 12))
    state = torch.zeros(1, *whole.state_size)
    expected = advance(whole, state, one_sequence(12), end := torch.empty_like(state))
    torch.set_num_threads(2)
    outputs = []
    for part in (slice(0, 5), slice(5, 6), slice(6, 12)):
        # Another sequence, whose values are NaN, has the same rows behind it.
        change = read(case, torch.cat([torch.arange(12)[part]] * 2))
        num_rows = part.stop - part.start
        rows = StateRows(torch.tensor([0, num_rows, 2 * num_rows]), torch.tensor([0, 1]))
        states = torch.cat([state, torch.full_like(state, torch.nan)])
        after = torch.empty_like(states)
        outputs.append(advance(change, states, rows, after)[:num_rows])
        state = after[:1]
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(state, end)


def one_sequence(num_rows: int) -> StateRows:
    return StateRows(torch.tensor([0, num_rows]), torch.tensor([0]))
