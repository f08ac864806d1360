"""An adapter's measured effect, compared with torch's own figures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loraplex.api.adapters.probes import (
    NUM_RANDOM_PROBES,
    RANDOM_PROBE_TOKENS,
    ROUNDING,
    Logits,
    compare,
    probe_prompts,
    summarize,
)


def draw(seed: int, size: int = 50) -> Logits:
    return np.random.default_rng(seed).normal(scale=4, size=size).astype(np.float32)


def test_the_divergence_is_torchs() -> None:
    base, adapter = draw(1), draw(2)
    log_base = torch.from_numpy(base).double().log_softmax(-1)
    log_adapter = torch.from_numpy(adapter).double().log_softmax(-1)
    expected = torch.nn.functional.kl_div(
        log_adapter, log_base, log_target=True, reduction="sum"
    ).item()
    effect = compare(3, base, base, adapter)
    assert effect.kl_divergence == pytest.approx(expected, rel=1e-9)
    assert effect.max_logit_delta == pytest.approx(np.abs(base - adapter).max(), rel=1e-6)
    assert effect.noise_floor == pytest.approx(ROUNDING * np.abs(base).max())
    assert effect.changes_top_token == (base.argmax() != adapter.argmax())


def test_huge_logits_do_not_overflow() -> None:
    base = np.array([3e38, -3e38, 0], np.float32)
    effect = compare(1, base, base, -base)
    assert np.isfinite(effect.max_logit_delta)
    assert np.isfinite(effect.kl_divergence)


@pytest.mark.parametrize(("shift", "is_noticeable"), [(0.0, False), (1e-5, False), (1e-3, True)])
def test_an_effect_counts_only_above_the_noise(shift: float, is_noticeable: bool) -> None:
    base, noise = draw(1), draw(2) * 1e-5
    changed = base.copy()
    changed[7] += shift
    effect = summarize([compare(2, base, base + noise, changed)])
    assert effect.is_noticeable is is_noticeable


def test_beside_a_silent_base_any_change_beyond_rounding_counts() -> None:
    base = draw(3)
    assert not summarize([compare(2, base, base, base)]).is_noticeable
    assert not summarize([compare(2, base, base, np.nextafter(base, base + 1))]).is_noticeable
    assert summarize([compare(2, base, base, base * 1.0001)]).is_noticeable


def test_one_noticeable_probe_suffices() -> None:
    base = draw(4)
    effect = summarize([compare(1, base, base, base), compare(5, base, base, base + 1)])
    assert effect.is_noticeable
    assert effect.as_report()["probes"][1]["num_tokens"] == 5


def test_probes_are_the_same_every_time_and_within_the_vocabulary() -> None:
    prompts = probe_prompts([5, 6], 10)
    assert prompts == probe_prompts([5, 6], 10)
    assert prompts[0] == [5, 6]
    assert [len(prompt) for prompt in prompts[1:]] == [RANDOM_PROBE_TOKENS] * NUM_RANDOM_PROBES
    assert all(0 <= token < 10 for prompt in prompts for token in prompt)
    assert len(probe_prompts([], 10)) == NUM_RANDOM_PROBES
