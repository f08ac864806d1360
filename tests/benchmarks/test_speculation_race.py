"""The comparison of two decoders, and which differences rounding may cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.speculation_arms import Decoding, tokens_per_second

from support.engine import LocalEngine
from support.greedy import parts_at_near_tie


def test_speed_is_that_of_all_decodings_from_a_step_on() -> None:
    slow = Decoding(step_seconds=[9.0, 1.0, 1.0], step_tokens=[1, 1, 1])
    fast = Decoding(step_seconds=[1.0, 2.0], step_tokens=[1, 6])
    assert tokens_per_second([slow]) == pytest.approx(3 / 11)
    assert tokens_per_second([slow, fast]) == pytest.approx(10 / 14)
    assert tokens_per_second([slow, fast], first_step=1) == pytest.approx(8 / 4)


def test_the_mean_accepted_length_leaves_out_the_tokens_of_the_prompts_step() -> None:
    assert Decoding([[1, 2, 3], [4]], num_draws=4).mean_accepted_length == 1
    assert Decoding([[1, 2, 3, 4, 5]], num_draws=3).mean_accepted_length == 2


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_near_ties_are_judged_by_what_the_engine_draws_by(
    tiny_base: Path, tmp_path: Path, temperature: float
) -> None:
    engine = LocalEngine(tiny_base, tmp_path)
    prompt, seed = [5, 6, 7], 3
    request_id = engine.submit(prompt, max_tokens=2, temperature=temperature, seed=seed)
    engine.run()
    (drawn, _) = engine.answers[request_id].token_ids

    def is_near_tie(expected: int, actual: int) -> bool:
        return parts_at_near_tie(
            engine,
            prompt,
            None,
            expected=[expected],
            actual=[actual],
            gap=1e-6,
            temperature=temperature,
            seed=seed,
        )

    others = [token for token in range(0, 250, 25) if token != drawn]
    assert all(is_near_tie(other, drawn) for other in others), "the drawn one scores highest"
    assert not any(is_near_tie(drawn, other) for other in others)
    engine.close()
