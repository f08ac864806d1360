"""The devices of a group: the CPU for all ranks, or a CUDA device each.

A follower's process sees its own CUDA device alone, so whatever it and its threads do is done
there. Rank 0 uses the first one that its process sees, as without ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ..config import EngineConfig
from ..errors import InvalidParameter, UnsupportedModel
from ..model.base_model import choose_device

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def choose_rank_device(config: EngineConfig) -> torch.device:
    """The device of rank 0, of the kind that every rank has.

    Raises InvalidParameter if it does not exist or there are too few, UnsupportedModel if the group
    cannot be connected there.
    """
    device = choose_device(config.device)
    if device.type == "cpu":
        return device
    if config.pipeline_parallel_size > 1:
        raise UnsupportedModel(
            "pipeline parallelism is supported on the CPU only: give --device cpu"
        )
    if config.num_local_ranks not in (None, config.num_ranks):
        raise UnsupportedModel(
            "ranks on several hosts are supported on the CPU only: give --device cpu"
        )
    if device.index is not None:
        raise InvalidParameter(
            "device",
            f"{device} is one device, and each rank needs its own: give cuda, and {_VISIBLE}",
        )
    num_devices = torch.cuda.device_count()
    if num_devices < config.num_ranks:
        raise InvalidParameter(
            "tensor_parallel_size",
            f"{config.num_ranks} ranks need a CUDA device each, and this process sees "
            f"{num_devices}; --device cpu serves them on the CPU",
        )
    if not dist.is_nccl_available():
        raise UnsupportedModel("a group of ranks on CUDA needs a PyTorch with NCCL")
    return device


def rank_environment(device: torch.device, rank: int) -> Mapping[str, str]:
    """The environment variables that give a follower its device."""
    if device.type == "cpu":
        return {}
    visible = os.environ.get(_VISIBLE)
    return {_VISIBLE: str(rank) if visible is None else visible.split(",")[rank].strip()}
