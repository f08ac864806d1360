"""Convolutions of several sequences at once, against PyTorch's of each whole sequence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loraplex.kernels.causal_conv import causal_conv, conv_index

CHANNELS = 6


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("has_bias", [False, True])
def test_chunks_of_sequences_give_the_convolution_of_each_whole(width: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(CHANNELS, width, generator=generator)
    bias = torch.randn(CHANNELS, generator=generator) if has_bias else None
    whole = [torch.randn(length, CHANNELS, generator=generator) for length in (9, 1, 14)]
    done = [0, 0, 0]
    states = torch.zeros(3, CHANNELS, width - 1)
    found: list[list[torch.Tensor]] = [[], [], []]
    for chunk in ([1, 1, 5], [1, 0, 1], [4, 0, 1], [3, 0, 7]):
        members = [index for index in range(3) if chunk[index]]
        counts = torch.tensor([chunk[index] for index in members])
        parts = [whole[index][done[index] : done[index] + chunk[index]] for index in members]
        index = conv_index(counts.cumsum(0) - counts, counts, width)
        out, after = causal_conv(torch.cat(parts), weight, bias, states[members], index)
        states[members] = after
        for member, part in zip(members, out.split(counts.tolist()), strict=True):
            found[member].append(part)
            done[member] += len(part)

    for sequence, parts in zip(whole, found, strict=True):
        padded = F.pad(sequence.T[None], (width - 1, 0))
        expected = F.conv1d(padded, weight[:, None], bias, groups=CHANNELS)[0].T
        torch.testing.assert_close(torch.cat(parts), expected)
    last = F.pad(whole[0].T, (width - 1, 0))[:, -(width - 1) :]
    torch.testing.assert_close(states[0], last)


def test_values_of_another_sequence_never_enter_a_sum() -> None:
    counts = torch.tensor([2, 1, 3])
    index = conv_index(counts.cumsum(0) - counts, counts, 4)
    x = torch.ones(6, CHANNELS)
    x[2] = float("nan")
    states = torch.zeros(3, CHANNELS, 3)
    out, after = causal_conv(x, torch.ones(CHANNELS, 4), None, states, index)
    assert out[[0, 1, 3, 4, 5]].isfinite().all()
    assert after[[0, 2]].isfinite().all()
    assert out[2].isnan().all()
