"""The share of a core that adapter loading may use, by the device."""

from __future__ import annotations

import math

import pytest
import torch

from loraplex.engine.memory import loader_duty
from loraplex.engine.memory.loader_duty import choose_duty, duty_for, measure_slowdown


@pytest.mark.parametrize(
    ("slowdown", "duty"), [(0.0, 1.0), (0.05, 1.0), (0.1, 0.5), (0.25, 0.2), (0.5, 0.1), (60, 0.1)]
)
def test_the_more_a_loader_thread_prolongs_steps_the_less_it_may_run(
    slowdown: float, duty: float
) -> None:
    assert duty_for(slowdown) == pytest.approx(duty)


def test_on_the_cpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_duty, "measure_slowdown", None)
    assert choose_duty(torch.device("cpu")) == loader_duty.MIN_DUTY


def test_the_measurement_ends_with_a_part_of_the_steps_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader_duty, "NUM_ROUNDS", 2)
    slowdown = measure_slowdown(torch.device("cpu"))
    assert math.isfinite(slowdown)
    assert slowdown >= 0


def test_the_measurement_leaves_the_global_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_duty, "NUM_ROUNDS", 1)
    monkeypatch.setattr(loader_duty, "ROUND_SECONDS", 0.0)
    state = torch.get_rng_state()
    measure_slowdown(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
