"""Recurrences of layers with states on CUDA: compared with their definition, and timed.

Times are of captured graphs: decoding sequences beside the time that a copy of their states takes,
and a prompt.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from benchmarks.attention_check import graph_seconds
from benchmarks.bench_states import LAYERS
from benchmarks.quantized_forms_check import copy_bandwidth
from torch import Tensor

from loraplex.kernels.state_rows import StateRows
from support.recurrence_cases import RecurrenceCase, plain_advance, read

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Of the largest element."""
COUNTS = (1, 70, 1, 3, 1)
"""The rows of each sequence: decoding ones beside chunks of prompts."""
TIMED_SEQUENCES = (1, 16, 128)
PROMPT_ROWS = 2_048


def check_recurrences(device: str) -> dict[str, Any]:
    """The largest errors of outputs and states, of a step with sequences of several lengths."""
    torch.manual_seed(0)
    errors: dict[str, float] = {}
    is_ok = True
    for name, draw in LAYERS.items():
        for dtype, tolerance in TOLERANCES.items():
            case = draw(sum(COUNTS), dtype).to(device)
            ours, theirs = _advance(case, is_plain=False), _advance(case, is_plain=True)
            error = max(
                float((a.float() - b.float()).abs().max() / b.float().abs().max())
                for a, b in zip(ours, theirs, strict=True)
            )
            errors[f"{name}, {str(dtype).removeprefix('torch.')}"] = error
            is_ok &= error <= tolerance
    return {"ok": is_ok, "errors": errors}


def _advance(case: RecurrenceCase, *, is_plain: bool) -> tuple[Tensor, Tensor]:
    """The outputs and the states after them."""
    change, device = read(case, slice(None)), case.device
    generator = torch.Generator(device).manual_seed(1)
    states = torch.randn(len(COUNTS), *change.state_size, device=device, generator=generator)
    bounds = torch.tensor([0, *COUNTS], device=device).cumsum(0)
    rows = StateRows(bounds, torch.arange(len(COUNTS), device=device).flip(0))
    after = torch.empty_like(states)
    advance = partial(plain_advance, change) if is_plain else change.advance
    return advance(states, rows, after), after


def time_recurrences(device: str) -> list[dict[str, Any]]:
    """Microseconds of each layer in bf16: of one row of some sequences, over a copy of their
    states; and of a prompt."""
    bandwidth = copy_bandwidth(device)
    found = []
    for name, draw in LAYERS.items():
        for num_sequences, num_rows in [*((many, 1) for many in TIMED_SEQUENCES), (1, PROMPT_ROWS)]:
            change = read(draw(num_sequences * num_rows, torch.bfloat16).to(device), slice(None))
            sequences = torch.arange(num_sequences + 1, device=device)
            rows = StateRows(sequences * num_rows, sequences[:-1])
            states = torch.zeros(num_sequences, *change.state_size, device=device)
            after = torch.empty_like(states)
            seconds = graph_seconds(partial(change.advance, states, rows, after))
            figures: dict[str, Any] = {
                "layer": name,
                "sequences": num_sequences,
                "rows": num_rows,
                "microseconds": round(1e6 * seconds, 1),
            }
            if num_rows == 1:
                figures["over floor"] = round(seconds * bandwidth / (2 * states.nbytes), 2)
            found.append(figures)
    return found
