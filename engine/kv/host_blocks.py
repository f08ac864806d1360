"""The tensors of one KV group's host slots, and the place of each slot in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import shared_slot_bytes


class SlotMemory(NamedTuple):
    """Host memory for the slots of one group, at whose beginning others may have a part."""

    group: int
    memory: Tensor
    """uint8."""


class HostBlocks:
    """The slots of one group. A slot keeps its id, and has another place if others get its place's
    memory."""

    def __init__(
        self, device: Sequence[Tensor], num_slots: int, memory: Tensor | None = None
    ) -> None:
        """`device`: the group's tensors there, `[layers, num_blocks, ...]` each. `memory`: uint8,
        where the slots are, the last one at its end; None: it is allocated."""
        self.tensors = (
            [_allocate(tensor, num_slots) for tensor in device]
            if memory is None
            else _views(device, num_slots, memory)
        )
        """Likewise, by place."""
        self._places = list(range(num_slots))
        self._slots = list(range(num_slots))
        """By place."""

    def parts(self, slot: int) -> list[Tensor]:
        """The slot's part of each tensor: `[layers, ...]`."""
        return [tensor[:, self._places[slot]] for tensor in self.tensors]

    def index(self, slots: Sequence[int]) -> Tensor:
        """The places of these slots: int64."""
        return torch.tensor([self._places[slot] for slot in slots], dtype=torch.int64)

    def give_up(self, slots: Sequence[int], first_place: int) -> None:
        """Move what is in the places from `first_place` on to the places of these slots, whose
        content is lost, and exchange the places. All earlier copies have ended.

        Then these slots hold zeros: neither what was lost nor a copy of what has moved could be
        erased any more when its adapter is deleted.
        """
        lost = set(slots)
        for place, slot in enumerate(slots, first_place):
            freed, other = self._places[slot], self._slots[place]
            if other not in lost:
                for tensor in self.tensors:
                    tensor[:, freed] = tensor[:, place]
            self._places[slot], self._places[other] = place, freed
            self._slots[place], self._slots[freed] = slot, other
        for tensor in self.tensors:
            tensor[:, first_place : first_place + len(slots)].zero_()


def _allocate(like: Tensor, num_slots: int) -> Tensor:
    # Never read before written, so the memory is not touched before it is needed.
    size = (len(like), num_slots, *like.shape[2:])
    return torch.empty(size, dtype=like.dtype, pin_memory=like.is_cuda)


def _views(device: Sequence[Tensor], num_slots: int, memory: Tensor) -> list[Tensor]:
    """A slot is contiguous: its part of each tensor, those with the largest elements first."""
    stride = shared_slot_bytes(sum(tensor[:, 0].nbytes for tensor in device))
    offset = memory.numel() - num_slots * stride
    assert offset >= 0, "the slots fit"
    views: dict[int, Tensor] = {}
    order = sorted(range(len(device)), key=lambda index: device[index].itemsize, reverse=True)
    for index in order:
        like = device[index]
        block = like.shape[2:]
        elements = memory.view(like.dtype)
        of_slot = torch.empty((len(like), *block), dtype=like.dtype, device="meta")
        views[index] = elements.as_strided(
            (len(like), num_slots, *block),
            (of_slot.stride(0), stride // like.itemsize, *of_slot.stride()[1:]),
            elements.storage_offset() + offset // like.itemsize,
        )
        offset += of_slot.nbytes
    return [views[index] for index in range(len(device))]
