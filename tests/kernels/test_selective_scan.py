"""The selective scan against transformers' own, which begins with zeros."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers.models.mamba import modeling_mamba

from loraplex.kernels.selective_scan import selective_scan

CHANNELS, SIZE = 6, 5


def draw(batch: int, length: int, *, has_gate: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(length)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    return {
        "hidden_states": normal(batch, CHANNELS, length),
        "dt": normal(batch, CHANNELS, length),
        "A": -normal(CHANNELS, SIZE).exp(),
        "B": normal(batch, SIZE, length),
        "C": normal(batch, SIZE, length),
        "D": normal(CHANNELS) if has_gate else None,
        "z": normal(batch, CHANNELS, length) if has_gate else None,
        "delta_bias": normal(CHANNELS) if has_gate else None,
        "delta_softplus": True,
    }


@pytest.mark.parametrize("has_gate", [False, True])
def test_it_equals_transformers_scan(has_gate: bool) -> None:
    own = inspect.unwrap(modeling_mamba.mamba_selective_scan)
    arguments = draw(2, 7, has_gate=has_gate)
    out, state = selective_scan(**arguments)
    expected, expected_state = own(**arguments, return_last_state=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(state, expected_state)


def test_it_goes_on_from_the_state_of_a_part() -> None:
    arguments = draw(2, 11, has_gate=True)
    whole, end = selective_scan(**arguments)
    state, parts = None, []
    for part in (slice(0, 4), slice(4, 5), slice(5, 11)):
        cut = {
            name: value[..., part] if name in ("hidden_states", "dt", "B", "C", "z") else value
            for name, value in arguments.items()
        }
        out, state = selective_scan(**cut, initial_state=state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=-1), whole)
    torch.testing.assert_close(state, end)
