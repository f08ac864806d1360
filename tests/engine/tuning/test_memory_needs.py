"""The memory of a step is estimated before the first one, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.memory.device_memory import peak_bytes
from loraplex.engine.memory.host_memory import status_bytes
from loraplex.engine.tuning.errors import InsufficientTrainingMemory
from loraplex.engine.tuning.memory_needs import MIB
from loraplex.engine.tuning.messages import FromTrainer, Open, Ready
from loraplex.engine.tuning.step_shapes import Shapes
from support.models import make_tiny_llama
from support.tuning import chat_line, of_kind, open_order, recipe, train_here, write_lines

LONG = "a" * 600
"""Longer than a sequence: it is cut."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("base"), num_hidden_layers=4)


def order_of(base: Path, work: Path, **changes: Any) -> Open:
    work.mkdir(exist_ok=True)
    lines = write_lines(work / "lines", [chat_line("Why?", LONG) for _ in range(16)])
    settings = recipe(batch_size=16, max_tokens=512)
    return open_order(base, lines, work, **{"recipe": settings, **changes})


def test_the_estimate_is_more_than_what_is_measured_and_not_many_times_as_much(
    base: Path, tmp_path: Path
) -> None:
    reports: list[FromTrainer] = []
    order = order_of(base, tmp_path)
    measured = peak_bytes(torch.device("cpu"), lambda: reports.extend(train_here(order)))
    (ready,) = of_kind(reports, Ready)
    assert measured > 100 * MIB, "else the estimate is compared with noise"
    assert measured <= ready.step_bytes <= 4 * measured


def test_a_run_that_cannot_fit_is_refused_before_its_first_step(base: Path, tmp_path: Path) -> None:
    now = status_bytes(Path("/proc/self/status"), "VmSize")
    with pytest.raises(InsufficientTrainingMemory, match=r"0 MiB are left; use a smaller `batch"):
        train_here(order_of(base, tmp_path, max_memory_bytes=now // 2))
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_step_needs_more_for_more_and_longer_sequences() -> None:
    shapes = Shapes(linear_features=1000, vocab_size=500, num_scores=8, num_parameters=10_000)
    short = shapes.bytes(num_rows=2, width=100)
    assert shapes.bytes(num_rows=4, width=100) > short
    assert shapes.bytes(num_rows=1, width=200) > short, "attention grows with the square"
    assert shapes.bytes(num_rows=0, width=0) == 4 * 5 * 10_000, "a part is the adapter's"


def test_short_examples_need_less_than_the_recipe_allows(base: Path, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "lines", [chat_line("Why?", "So.") for _ in range(4)])
    few, many = (
        of_kind(train_here(order), Ready)[0].step_bytes
        for order in (
            open_order(base, lines, tmp_path / "few", recipe=recipe(max_tokens=512)),
            order_of(base, tmp_path / "many"),
        )
    )
    assert few < many // 10
