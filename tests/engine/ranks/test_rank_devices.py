"""Each rank of a group on CUDA has a device of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import EngineError, InvalidParameter, UnsupportedModel
from loraplex.engine.execution.profiling import rank_memory
from loraplex.engine.memory.device_memory import DeviceMemory
from loraplex.engine.ranks.rank_devices import choose_rank_device, rank_environment
from loraplex.engine.shards.rank_sums import RankSums
from support.ranks import run_ranks

CUDA = torch.device("cuda")


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


@pytest.mark.usefixtures("two_devices")
def test_as_many_ranks_as_devices_are_served() -> None:
    config = EngineConfig("base", tensor_parallel_size=2)
    assert choose_rank_device(config) == CUDA
    on_cpu = EngineConfig("base", device="cpu", tensor_parallel_size=3)
    assert choose_rank_device(on_cpu) == torch.device("cpu")


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(
    ("settings", "error", "reason"),
    [
        ({"tensor_parallel_size": 3}, InvalidParameter, "3 ranks need a CUDA device each"),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, InvalidParameter, "each rank needs"),
        ({"pipeline_parallel_size": 2}, UnsupportedModel, "pipeline parallelism .* on the CPU"),
    ],
    ids=str,
)
def test_what_is_not_served_on_cuda_is_refused_by_name(
    settings: dict[str, Any], error: type[EngineError], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        choose_rank_device(EngineConfig("base", **settings))


@pytest.mark.usefixtures("two_devices")
def test_a_pytorch_without_nccl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(UnsupportedModel, match="NCCL"):
        choose_rank_device(EngineConfig("base", tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, "1"), ("4,7", "7"), ("GPU-a, GPU-b", "GPU-b")],
)
def test_a_follower_sees_its_own_one_of_the_visible_devices(
    visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert rank_environment(CUDA, 1) == {"CUDA_VISIBLE_DEVICES": expected}
    assert rank_environment(torch.device("cpu"), 1) == {}


def test_ranks_plan_with_the_least_memory_of_their_devices_or_an_equal_share_of_the_host() -> None:
    def planned(ranks: RankSums) -> tuple[int, int]:
        free_bytes = (9 << 40) - ranks.place.rank
        device = rank_memory(DeviceMemory(free_bytes, is_host=False), 3, ranks)
        host = rank_memory(DeviceMemory(900, is_host=True), 3, ranks)
        return device.free_bytes, host.free_bytes

    assert run_ranks(3, planned) == [((9 << 40) - 2, 300)] * 3
