"""The memory of a step is estimated before the first one, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.memory.host_memory import status_bytes
from loraplex.engine.tuning.errors import InsufficientTrainingMemory
from loraplex.engine.tuning.memory_needs import MIB
from loraplex.engine.tuning.messages import Open, Ready
from loraplex.engine.tuning.methods import Method
from loraplex.engine.tuning.step_shapes import Shapes
from support.models import make_tiny_llama
from support.tuning import chat_line, of_kind, open_order, recipe, train_here, write_lines

LONG = "a" * 600
"""Longer than a sequence: it is cut."""
BYTES_IN_PROCESS = 1.6
"""Per byte of its tensors: a fresh process grew by 1.4 times their bytes for sequences, and by 1.6
times for pairs."""
SHORT: dict[str, Any] = {"batch_size": 8, "max_tokens": 32}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("base"), num_hidden_layers=4)


def pair_line(question: str, preferred: str, other: str) -> dict[str, Any]:
    return {
        "input": {"messages": [{"role": "user", "content": question}]},
        "preferred_output": [{"role": "assistant", "content": preferred}],
        "non_preferred_output": [{"role": "assistant", "content": other}],
    }


def order_of(base: Path, work: Path, method: Method = Method.SUPERVISED, **changes: Any) -> Open:
    """A step of 16 long sequences, or of 4 pairs."""
    work.mkdir(exist_ok=True)
    is_dpo = method is Method.DPO
    batch_size = 4 if is_dpo else 16
    line = pair_line("Why?", LONG, f"{LONG}b") if is_dpo else chat_line("Why?", LONG)
    lines = write_lines(work / "lines", [line] * batch_size)
    settings = recipe(method=method.value, batch_size=batch_size, max_tokens=512)
    return open_order(base, lines, work, **{"recipe": settings, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("method", list(Method))
def test_the_estimate_is_more_than_what_is_measured_and_not_many_times_as_much(
    base: Path, tmp_path: Path, method: Method
) -> None:
    order = order_of(base, tmp_path / "measured", method)
    with torch.profiler.profile(profile_memory=True) as profile:
        (ready,) = of_kind(train_here(order), Ready)
    measured = peak_tensor_bytes(profile, tmp_path / "trace.json")
    assert measured > 100 * MIB, "else the estimate is compared with noise"
    assert BYTES_IN_PROCESS * measured <= ready.step_bytes <= 4 * measured


def peak_tensor_bytes(profile: torch.profiler.profile, file: Path) -> int:
    """Of the CPU's tensors alone: what the process holds also depends on the tests before."""
    profile.export_chrome_trace(str(file))
    events = json.loads(file.read_bytes())["traceEvents"]
    return max(
        int(each["args"]["Total Allocated"]) for each in events if each["name"] == "[memory]"
    )


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


@pytest.mark.slow
def test_a_step_of_pairs_needs_as_much_as_one_of_so_many_sequences(
    base: Path, tmp_path: Path
) -> None:
    """However short the other end is: both are padded to the longest sequence of the step."""
    lines = write_lines(tmp_path / "lines", [pair_line("Why?", LONG, "No.")] * 8)
    pairs, sequences = (
        of_kind(train_here(order), Ready)[0].step_bytes
        for order in (
            open_order(base, lines, tmp_path / "pairs", recipe=recipe(**SHORT, method="dpo")),
            order_of(base, tmp_path / "sequences", recipe=recipe(**{**SHORT, "batch_size": 16})),
        )
    )
    assert pairs == sequences


@pytest.mark.slow
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
