"""A row's sum over the ranks does not depend on its place or on the rows beside it."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from loraplex.engine.shards import rank_sums
from loraplex.engine.shards.rank_place import RankPlace
from loraplex.engine.shards.rank_sums import RankSums, connect_ranks
from support.ranks import run_ranks

SIZE = 512
PLACES = ((1, 0), (2, 1), (7, 3), (32, 0), (32, 31), (256, 200))
"""Rows of a message, and the place of the observed row among them."""
DTYPES = (torch.float32, torch.bfloat16)


def row_of(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_rows_sum_is_bit_equal_wherever_it_stands(size: int) -> None:
    def sums(ranks: RankSums) -> list[Tensor]:
        generator = torch.Generator().manual_seed(100 + ranks.place.rank)
        found = []
        for dtype in DTYPES:
            for num_rows, place in PLACES:
                part = torch.randn(num_rows, SIZE, generator=generator).to(dtype)
                part[place] = row_of(ranks.place.rank, dtype)
                found.append(ranks.add(part)[place].clone())
        return found

    of_ranks = run_ranks(size, sums)
    for index, dtype in enumerate(DTYPES):
        expected = row_of(0, dtype).clone()
        for rank in range(1, size):
            expected += row_of(rank, dtype)
        for found in of_ranks:
            for row in found[index * len(PLACES) : (index + 1) * len(PLACES)]:
                assert torch.equal(row, expected)


@pytest.mark.parametrize("size", [2, 3])
def test_a_gather_gives_every_rank_the_parts_in_the_order_of_the_ranks(size: int) -> None:
    of_ranks = run_ranks(size, lambda ranks: ranks.gather(torch.full((2, 3), ranks.place.rank)))
    for parts in of_ranks:
        assert [int(part[0, 0]) for part in parts] == list(range(size))


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_the_first_rank_collects_parts_of_unequal_widths(num_rows: int) -> None:
    widths = [4, 4, 1]

    def collect(ranks: RankSums) -> list[Tensor]:
        rank = ranks.place.rank
        return ranks.collect(torch.full((num_rows, widths[rank]), float(rank)), widths)

    first, *others = run_ranks(3, collect)
    assert others == [[], []]
    for rank, part in enumerate(first):
        assert torch.equal(part, torch.full((num_rows, widths[rank]), float(rank)))


@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (256, 96)], ids=str)
def test_a_sum_in_parts_is_bit_equal_to_that_of_whole_messages(
    size: int, shape: tuple[int, int]
) -> None:
    """Most sizes cannot be divided among the ranks."""

    def sums(ranks: RankSums) -> list[Tensor]:
        generator = torch.Generator().manual_seed(ranks.place.rank)
        parts = [torch.randn(shape, generator=generator).to(dtype) for dtype in DTYPES]
        return [add(part) for part in parts for add in (ranks.add_gathered, ranks.add_in_parts)]

    for gathered, in_parts, *others in run_ranks(size, sums):
        assert torch.equal(gathered, in_parts)
        assert torch.equal(*others)


def test_large_sums_of_three_ranks_and_more_are_added_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_sums, "TWO_SHOT_BYTES", 4 * SIZE)
    monkeypatch.setattr(RankSums, "add_in_parts", lambda _self, part: part - 1)

    def add(ranks: RankSums) -> list[float]:
        return [ranks.add(torch.zeros(count, SIZE // 2))[0, 0].item() for count in (1, 2)]

    assert run_ranks(3, add) == [[0.0, -1.0]] * 3
    assert run_ranks(2, add) == [[0.0, 0.0]] * 2


def test_a_sum_of_parts_that_are_not_contiguous_is_right() -> None:
    def add(ranks: RankSums) -> Tensor:
        return ranks.add(torch.arange(6.0).view(2, 3).T + ranks.place.rank)

    for whole in run_ranks(2, add):
        assert torch.equal(whole, 2 * torch.arange(6.0).view(2, 3).T + 1)


@pytest.mark.parametrize("size", [2, 3])
def test_the_largest_values_are_those_of_all_ranks(size: int) -> None:
    def largest(ranks: RankSums) -> Tensor:
        part = torch.zeros(3, 1)
        part[0] = ranks.place.rank
        part[1] = -ranks.place.rank
        if ranks.place.rank == 1:
            part[2] = torch.nan
        return ranks.largest(part)

    for found in run_ranks(size, largest):
        assert found[:2].tolist() == [[size - 1], [0]]
        assert found[2].isnan(), "a broken row is broken on every rank"


@pytest.mark.parametrize("fails", [False, True], ids=["connected", "failed"])
@pytest.mark.parametrize("operators", [None, "eth7"])
def test_nccl_connects_over_loopback_unless_told_and_leaves_the_environment(
    monkeypatch: pytest.MonkeyPatch, operators: str | None, fails: bool
) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if operators:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", operators)
    seen: list[str] = []

    def warm_up(_self: RankSums) -> None:
        seen.append(os.environ["NCCL_SOCKET_IFNAME"])
        if fails:
            raise RuntimeError("a rank has died")

    monkeypatch.setattr(rank_sums, "open_nccl", lambda *_args: None)
    monkeypatch.setattr(RankSums, "warm_up", warm_up)
    before = dict(os.environ)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        connect_ranks(HashStore(), RankPlace(0, 2), torch.device("cuda"))
    assert seen == [operators or "lo"]
    assert dict(os.environ) == before
