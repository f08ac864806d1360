"""Host slots keep their content while their places change, beside others' memory."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from loraplex.engine.kv.host_blocks import HostBlocks
from loraplex.engine.kv.layout import shared_slot_bytes

NUM_SLOTS = 7
OTHERS = 7


def device_tensors() -> list[Tensor]:
    """Tensors of different dtypes and sizes, as of quantized keys and values."""
    return [
        torch.zeros(2, 3, 4, 5, dtype=torch.int8),
        torch.zeros(2, 3, 4, dtype=torch.float32),
        torch.zeros(1, 3, 3, dtype=torch.bfloat16),
    ]


class World:
    """Slots at the end of memory whose beginning others have."""

    def __init__(self) -> None:
        device = device_tensors()
        self.slot_bytes = shared_slot_bytes(sum(tensor[:, 0].nbytes for tensor in device))
        self.memory = torch.full((64 + NUM_SLOTS * self.slot_bytes,), OTHERS, dtype=torch.uint8)
        self.blocks = HostBlocks(device, NUM_SLOTS, self.memory[8:])
        self.content: dict[int, int] = {}

    def write(self, slot: int, value: int) -> None:
        self.content[slot] = value
        index = self.blocks.index([slot])
        for tensor in self.blocks.tensors:
            tensor.index_fill_(1, index, value)

    def check(self) -> None:
        """Each slot has its content, read in either way."""
        for slot, value in self.content.items():
            for tensor, part in zip(self.blocks.tensors, self.blocks.parts(slot), strict=True):
                assert (part == value).all()
                assert (tensor.index_select(1, self.blocks.index([slot])) == value).all()


@pytest.fixture
def world() -> World:
    return World()


def test_slots_are_at_the_end_of_the_memory_and_do_not_overlap(world: World) -> None:
    for slot in range(NUM_SLOTS):
        world.write(slot, slot)
    world.check()
    assert (world.memory[:64] == OTHERS).all()
    slots = world.memory[64:].view(NUM_SLOTS, world.slot_bytes)
    first_dtype = slots[:, :4].contiguous().view(torch.float32)  # the largest elements are first
    assert first_dtype.flatten().tolist() == list(range(NUM_SLOTS))


@pytest.mark.parametrize("seed", range(20))
def test_slots_keep_their_content_when_others_give_up_places(world: World, seed: int) -> None:
    rng = random.Random(seed)
    withdrawn: list[int] = []
    for step in range(30):
        in_use = [slot for slot in range(NUM_SLOTS) if slot not in withdrawn]
        for slot in rng.sample(in_use, len(in_use) // 2):
            world.write(slot, rng.randrange(100))
        if step % 2:
            for _ in range(rng.randint(0, len(withdrawn))):
                world.content[withdrawn.pop()] = OTHERS  # that is what its place holds
        else:
            given_up = rng.sample(in_use, rng.randint(0, len(in_use)))
            for slot in given_up:
                world.content.pop(slot, None)
            world.blocks.give_up(given_up, len(withdrawn))
            withdrawn += given_up
        end = 64 + len(withdrawn) * world.slot_bytes
        others = world.memory[64:end].clone().fill_(OTHERS)
        world.memory[64:end] = others
        for slot in [slot for slot, value in world.content.items() if value == OTHERS]:
            del world.content[slot]  # bytes, not values
        world.check()


def test_restored_slots_have_the_places_that_others_gave_back_last(world: World) -> None:
    world.blocks.give_up([5, 1, 3], 0)
    world.blocks.give_up([0], 3)
    places = {slot: int(world.blocks.index([slot])) for slot in range(NUM_SLOTS)}
    assert [places[slot] for slot in (5, 1, 3, 0)] == [0, 1, 2, 3]
    assert sorted(places.values()) == list(range(NUM_SLOTS))


def test_slots_that_gave_up_places_read_as_zeros_so_that_no_copy_outlives_its_prefix(
    world: World,
) -> None:
    for slot in range(NUM_SLOTS):
        world.write(slot, 1 + slot)
    given_up = [5, 1, 0]
    for slot in given_up:
        del world.content[slot]
    world.blocks.give_up(given_up, 0)
    world.check()
    for slot in given_up:
        assert all(torch.count_nonzero(part) == 0 for part in world.blocks.parts(slot))
