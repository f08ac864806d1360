"""The window compared with the reference, in memory full of NaN."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from loraplex.adapters.copy_budget import CopyBudget
from loraplex.kernels.lora_batch import ActiveAdapter
from loraplex.kernels.lora_reference import add_lora_reference
from loraplex.kernels.lora_window import MAX_MEMBER_ROWS, LoraWindow, _GrowingRows
from support.lora_weights import (
    POPULARITIES,
    PoisonedWeights,
    assert_lora_close,
    draw_rows,
    make_layout,
)

FIRST_SLICE = 1
IN_FEATURES, OUTS = 133, (63, 20, 20)
LAYOUT = make_layout((8, (8,)), (IN_FEATURES, OUTS))
RANKS = (
    {1: 1, 2: 1, 3: 1},
    {1: 4, 3: 2},
    {2: 7},
    {1: 16, 2: 16, 3: 16},
    {1: 64, 2: 3, 3: 64},
    {0: 5},
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def make_weights(dtype: torch.dtype = torch.float32) -> PoisonedWeights:
    weights = PoisonedWeights(LAYOUT, num_rows=8, dtype=dtype, capacity=1 << 19)
    for row, ranks in enumerate(RANKS):
        weights.put(row, ranks)
    return weights


def make_window(dtype: torch.dtype = torch.float32) -> LoraWindow:
    return LoraWindow(FIRST_SLICE, IN_FEATURES, OUTS, dtype=dtype)


def draw(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, IN_FEATURES, generator=generator)
    y = torch.randn(num_tokens, sum(OUTS), generator=generator)
    return x.to(dtype), y.to(dtype)


def reference(weights: PoisonedWeights, x: Tensor, y: Tensor, rows: Sequence[int]) -> Tensor:
    expected = y.clone()
    table = weights.table[:, FIRST_SLICE : FIRST_SLICE + len(OUTS)]
    add_lora_reference(x, expected, weights.flat, table, torch.tensor(rows), slice_outs=OUTS)
    return expected


def run_window(
    window: LoraWindow, weights: PoisonedWeights, x: Tensor, y: Tensor, rows: Sequence[int]
) -> Tensor:
    result = y.clone()
    adapters = sorted({ActiveAdapter(row, weights.generations[row]) for row in rows if row >= 0})
    window.add(x, result, weights, torch.tensor(rows, dtype=torch.int32), tuple(adapters))
    return result


def run_twice(
    window: LoraWindow, weights: PoisonedWeights, x: Tensor, y: Tensor, rows: Sequence[int]
) -> Tensor:
    """The result of the second step: new adapters join the window in it."""
    run_window(window, weights, x, y, rows)
    return run_window(window, weights, x, y, rows)


def held_values(window: LoraWindow) -> Tensor:
    buffers = [rows._buffer for rows in (window._a, *window._b)]
    return torch.cat([buffer.flatten() for buffer in buffers])


@DTYPES
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("num_tokens", [1, 7, 63])
def test_window_equals_the_reference(dtype: torch.dtype, popularity: str, num_tokens: int) -> None:
    weights = make_weights(dtype)
    x, y = draw(num_tokens, dtype)
    rows = draw_rows(popularity, num_tokens, len(RANKS))
    window = make_window(dtype)
    for _ in ("alone", "in the window"):
        result = run_window(window, weights, x, y, rows)
        assert_lora_close(result, reference(weights, x, y, rows))
        assert torch.equal(result[torch.tensor(rows) == -1], y[torch.tensor(rows) == -1]), (
            "base rows are untouched"
        )


def test_an_adapter_joins_in_its_second_step_and_is_computed_in_its_first() -> None:
    weights, window = make_weights(), make_window()
    x, y = draw(3)
    run_twice(window, weights, x, y, [4, 4, 4])
    num_rows = window.num_rows
    for rows in ([4, 1, 4], [4, 0, 2], [0, 2, 4]):
        assert_lora_close(run_window(window, weights, x, y, rows), reference(weights, x, y, rows))
    joined = window.num_rows - num_rows
    assert joined == 3 + 7, "of adapters 0 and 2; 1 came for one step"


def test_adapters_that_come_for_one_step_take_no_members_place() -> None:
    weights, window = make_weights(), make_window()
    x, y = draw(2)
    run_twice(window, weights, x, y, [4, 3])
    num_rows = window.num_rows
    for step in range(40):
        run_window(window, weights, x, y, [step % 3] * 2)
    assert window.num_rows == num_rows


def test_window_equals_the_reference_while_adapters_join_leave_and_take_over_rows() -> None:
    rng = random.Random(0)
    weights, window = make_weights(), make_window()
    resident, active = set(range(len(RANKS))), [0, 1]
    for _ in range(300):
        change = rng.random()
        if change < 0.15 and resident:
            row = rng.choice(sorted(resident))
            weights.remove(row)
            resident.remove(row)
        elif change < 0.4 and len(resident) < 8:
            row = rng.choice(sorted(set(range(8)) - resident))
            weights.put(row, rng.choice(RANKS))
            resident.add(row)
        elif change < 0.45:
            window.forget(rng.randrange(8))
        elif change < 0.7:
            active = rng.sample(sorted(resident), min(len(resident), rng.randint(0, 4)))
        active = [row for row in active if row in resident]
        rows = rng.choices([*active, -1], k=rng.randint(1, 9))
        x, y = draw(len(rows))
        assert_lora_close(run_window(window, weights, x, y, rows), reference(weights, x, y, rows))


def test_window_copies_an_adapter_once_while_it_comes_and_goes() -> None:
    weights, window = make_weights(), make_window()
    x, y = draw(2)
    first = run_twice(window, weights, x, y, [3, 4])
    weights.flat.fill_(torch.nan)  # whoever reads it again shows it
    run_window(window, weights, x, y, [4, 4])
    assert_lora_close(run_window(window, weights, x, y, [3, 4]), first)


def test_window_never_takes_a_reused_row_for_its_former_adapter() -> None:
    weights, window = make_weights(), make_window()
    x, y = draw(3)
    run_twice(window, weights, x, y, [3, 4, -1])
    weights.remove(3)
    weights.put(3, {1: 2})
    rows = [3, 4, 3]
    for _ in ("alone", "in the window"):
        assert_lora_close(run_window(window, weights, x, y, rows), reference(weights, x, y, rows))


def test_window_drops_idle_adapters_once_carrying_them_has_cost_a_copy() -> None:
    weights, window = make_weights(), make_window()
    x, y = draw(4)
    run_twice(window, weights, x, y, [0, 1, 3, 4])
    num_all = window.num_rows
    assert num_all == 3 + 6 + 48 + 131
    run_window(window, weights, x, y, [4, 4, 4, 4])
    assert window.num_rows == num_all, "an adapter that leaves for a step is not copied again"
    for _ in range(20):
        run_window(window, weights, x, y, [4, 4, 4, 4])
    assert window.num_rows == 131


def test_forgetting_a_row_zeroes_its_weights_and_spares_the_others() -> None:
    weights, window = make_weights(), make_window()
    for row in (3, 4):
        for index in (1, 2, 3):
            for matrix in weights.matrices(row, index):
                matrix.fill_(row)
    x, y = draw(2)
    with torch.inference_mode():
        run_twice(window, weights, x, y, [3, 4])
    window.forget(3)
    assert not (held_values(window) == 3).any()
    assert (held_values(window) == 4).any()
    rows = [3, 4]
    assert_lora_close(run_window(window, weights, x, y, rows), reference(weights, x, y, rows))


def test_taking_over_a_row_and_packing_anew_leave_nothing_of_the_former_adapter() -> None:
    weights, window = make_weights(), make_window()
    for matrix in weights.matrices(2, 2):
        matrix.fill_(77)
    x, y = draw(2)
    run_twice(window, weights, x, y, [2, 4])
    assert (held_values(window) == 77).any()
    weights.remove(2)
    weights.put(2, {1: 1})
    run_window(window, weights, x, y, [2, 4])
    assert not (held_values(window) == 77).any()
    for matrix in weights.matrices(0, 1):
        matrix.fill_(88)
    run_twice(window, weights, x, y, [0, 4])
    assert (held_values(window) == 88).any()
    for _ in range(50):
        run_window(window, weights, x, y, [4, 4])
    assert not (held_values(window) == 88).any()


@DTYPES
@pytest.mark.parametrize("fault", ["x", "a", "b"])
def test_window_keeps_overflow_in_the_rows_of_its_adapter(fault: str, dtype: torch.dtype) -> None:
    weights = make_weights(dtype)
    rows = [3, 4, 3, -1, 1, 4]
    own = torch.tensor(rows) == 3
    x, y = draw(len(rows), dtype)
    clean = run_twice(make_window(dtype), weights, x, y, rows)
    if fault == "x":
        x[own] = torch.tensor([[torch.inf], [torch.nan]], dtype=dtype)
    a, b = weights.matrices(3, 2)
    if fault == "a":
        a[::2] = torch.finfo(dtype).max
        x[:, :3] = 9  # every token's product with it overflows
        clean = run_twice(make_window(dtype), make_weights(dtype), x, y, rows)
    if fault == "b":  # which intake refuses
        b[0], b[1], b[2] = torch.inf, -torch.inf, torch.nan
    window = make_window(dtype)
    first = run_window(window, weights, x, y, rows)
    assert first[~own].isfinite().all(), "no other row is reached in the first step either"
    result = run_window(window, weights, x, y, rows)
    assert torch.equal(result[~own], clean[~own])
    assert not torch.equal(result[own], clean[own])
    if fault != "b":
        assert not result[own].isfinite().all()


def test_windows_keep_to_their_common_budget_and_compute_the_rest_from_the_arena() -> None:
    weights, budget = make_weights(), CopyBudget(60_000)
    windows = [
        LoraWindow(FIRST_SLICE, IN_FEATURES, OUTS, dtype=torch.float32, budget=budget)
        for _ in range(2)
    ]
    rng = random.Random(1)
    for num_tokens in (1, 6, 3, 8, 2, 7) * 10:
        rows = [rng.choice([-1, 0, 1, 2, 3, 4, 5]) for _ in range(num_tokens)]
        x, y = draw(num_tokens)
        for window in windows:
            result = run_window(window, weights, x, y, rows)
            assert_lora_close(result, reference(weights, x, y, rows))
        assert sum(window.num_bytes for window in windows) == budget.used_bytes <= 60_000
    assert all(window.num_rows for window in windows)


def test_an_adapter_without_room_joins_once_idle_ones_have_cost_their_place() -> None:
    weights = make_weights()
    x, y = draw(2)
    measure = make_window()
    run_twice(measure, weights, x, y, [4, 4])
    budget = CopyBudget(measure.num_bytes)
    window = LoraWindow(FIRST_SLICE, IN_FEATURES, OUTS, dtype=torch.float32, budget=budget)
    run_twice(window, weights, x, y, [3, 3])
    assert window.num_rows == 48
    for _ in range(10):
        assert_lora_close(
            run_window(window, weights, x, y, [4, 4]), reference(weights, x, y, [4, 4])
        )
    assert window.num_rows == 131


def test_a_very_large_adapter_stays_outside_and_is_computed_all_the_same() -> None:
    weights = make_weights()
    weights.put(6, {1: MAX_MEMBER_ROWS, 2: 1})
    window = make_window()
    x, y = draw(3)
    for _ in range(5):
        rows = [6, 3, 6]
        assert_lora_close(run_window(window, weights, x, y, rows), reference(weights, x, y, rows))
    assert window.num_rows == 48


def test_overflow_outside_of_the_window_stays_in_its_own_rows() -> None:
    weights = make_weights()
    weights.put(6, {1: MAX_MEMBER_ROWS + 1})
    for matrix in weights.matrices(6, 1):
        matrix.fill_(1e30)
    x, y = draw(4)
    rows = [6, 3, -1, 6]
    result = run_twice(make_window(), weights, x, y, rows)
    clean = [1, 2]
    assert_lora_close(
        result[clean], reference(weights, x[clean], y[clean], [rows[i] for i in clean])
    )
    assert not result[[0, 3]].isfinite().all()


def test_forgetting_gives_no_memory_back_but_clearing_does() -> None:
    weights, budget = make_weights(), CopyBudget(1 << 30)
    window = LoraWindow(FIRST_SLICE, IN_FEATURES, OUTS, dtype=torch.float32, budget=budget)
    x, y = draw(2)
    run_twice(window, weights, x, y, [3, 4])
    before = budget.used_bytes
    window.forget(3)
    assert budget.used_bytes == before == window.num_bytes
    for _ in range(10):
        run_window(window, weights, x, y, [0, 0])
    assert budget.used_bytes == window.num_bytes < before


def test_what_a_forgotten_adapter_leaves_is_handed_over_and_never_read_again() -> None:
    """Dead rows are dirty until the budget's owner zeroes them; growing must not copy them."""
    weights, budget = make_weights(), CopyBudget(1 << 30)
    window = LoraWindow(FIRST_SLICE, IN_FEATURES, OUTS, dtype=torch.float32, budget=budget)
    for index in (1, 2, 3):
        for matrix in weights.matrices(3, index):
            matrix.fill_(3e30)
    x, y = draw(2)
    run_twice(window, weights, x, y, [3, 0])
    window.forget(3)
    discarded = budget.take_discarded()
    assert len(discarded) == 1 + len(OUTS)
    assert all((values == 3e30).all() for values in discarded)
    rows = [0, 0]
    assert_lora_close(run_window(window, weights, x, y, rows), reference(weights, x, y, rows))
    rows = [4, 1]  # makes the window grow
    assert_lora_close(run_twice(window, weights, x, y, rows), reference(weights, x, y, rows))
    assert not (held_values(window) == 3e30).any()
    assert budget.take_discarded() == []


def test_the_next_adapter_of_a_row_meets_no_dirty_rows_of_a_forgotten_one() -> None:
    weights, budget = make_weights(), CopyBudget(1 << 30)
    window = LoraWindow(FIRST_SLICE, IN_FEATURES, OUTS, dtype=torch.float32, budget=budget)
    x, y = draw(2)
    run_twice(window, weights, x, y, [3, 4])
    window.forget(3)  # and the budget's owner has not zeroed it yet
    num_rows = window.num_rows
    weights.remove(3)
    weights.put(3, {1: 2})
    rows = [3, 4]
    for _ in ("alone", "in the window"):
        assert_lora_close(run_window(window, weights, x, y, rows), reference(weights, x, y, rows))
    assert window.num_rows > num_rows, "its rows are still carried"


def test_growing_leaves_no_values_behind_and_takes_none_of_a_forgotten_adapter_along() -> None:
    rows = _GrowingRows((2,), torch.float32)
    rows.grow(2)
    rows.append(torch.ones(2, 2))
    former = rows.rows
    rows.mark_dead(slice(0, 1))  # and not zeroed yet
    rows.grow(4)
    assert rows.rows.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert not former.any()
