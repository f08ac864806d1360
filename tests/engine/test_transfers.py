"""Copies between host and device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loraplex.engine.transfers import HostCopy, to_device

CPU = torch.device("cpu")


@pytest.mark.parametrize("values", [[1, 2, 3], np.array([1, 2, 3]), torch.tensor([1, 2, 3])])
def test_values_of_every_kind_reach_the_device(values: object) -> None:
    copy = to_device(values, CPU, torch.int64)  # type: ignore[arg-type]
    assert copy.dtype is torch.int64
    assert copy.tolist() == [1, 2, 3]


def test_no_values_have_the_dtype_that_was_asked_for() -> None:
    assert to_device([], CPU, torch.int64).dtype is torch.int64


def test_a_host_copy_has_what_the_source_held_when_it_began() -> None:
    source = torch.arange(4)
    copy = HostCopy(source[1:3])
    source.fill_(9)
    assert copy.read().tolist() == [1, 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_copy_on_cuda_waits_for_no_later_work() -> None:
    source = to_device([1, 2, 3], torch.device("cuda"))
    copy = HostCopy(source)
    torch.cuda._sleep(1 << 30)  # about half a second
    later = torch.cuda.Event()
    later.record()
    assert copy.read().tolist() == [1, 2, 3]
    assert not later.query(), "the later work still runs"
    later.synchronize()
