"""Canaries whose marker is in the state: one crossing is visible in an answer."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.engine.model import inputs
from loraplex.engine.model.state_batch import StateBatch, make_state_batch
from support.canaries import run_canaries
from support.state_canaries import IN_STATES


def test_every_answer_comes_from_the_requests_own_state() -> None:
    found = run_canaries(60, seed=0, canaries=IN_STATES)
    assert found["foreign"] == 0
    assert found["evictions"] > 0


@pytest.mark.slow
def test_a_state_of_another_request_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def crossed(*args: Any, **others: Any) -> StateBatch:
        batch = make_state_batch(*args, **others)
        batch.rows.sources.copy_(batch.rows.sources.roll(1))
        return batch

    monkeypatch.setattr(inputs, "make_state_batch", crossed)
    assert run_canaries(40, seed=0, canaries=IN_STATES)["foreign"] > 0
