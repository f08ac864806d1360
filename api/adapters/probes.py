"""The probe prompts of attestation, and the comparison of their logits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

NOISE_MARGIN = 2.0
"""An effect counts if it exceeds the difference between two runs of the base by this factor."""
ROUNDING = 64 * float(np.finfo(np.float32).eps)
"""The rounding error of another summation order in fp32, relative to the largest logit."""
PROBE_TEXT = "The quick brown fox jumps over the lazy dog. In the beginning"
NUM_RANDOM_PROBES = 4
RANDOM_PROBE_TOKENS = 24
_SEED = 20_240_601

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ProbeEffect:
    """One prompt's next-token distribution with the base and with the adapter."""

    num_tokens: int
    max_logit_delta: float
    noise_floor: float
    """The base against itself, and at least rounding."""
    kl_divergence: float
    """KL(base ‖ adapter), in nats."""
    changes_top_token: bool


@dataclass(frozen=True, slots=True)
class Effect:
    """All probes together: the largest of each."""

    max_logit_delta: float
    noise_floor: float
    max_kl_divergence: float
    num_top_tokens_changed: int
    probes: tuple[ProbeEffect, ...]

    @property
    def is_noticeable(self) -> bool:
        return self.max_logit_delta > NOISE_MARGIN * self.noise_floor

    @property
    def objection(self) -> str | None:
        """Why the adapter is rejected as `no_effect`; None: it has an effect."""
        if self.is_noticeable:
            return None
        return (
            f"The adapter changes no logit by more than {self.max_logit_delta:.3g}; the base "
            f"model itself varies by {self.noise_floor:.3g}."
        )

    def as_report(self) -> dict[str, Any]:
        return asdict(self)


def probe_prompts(text_ids: Sequence[int], vocab_size: int) -> list[list[int]]:
    """The prompts: one text, and random tokens that are the same for every adapter and run."""
    generator = random.Random(_SEED)
    drawn = [
        [generator.randrange(vocab_size) for _ in range(RANDOM_PROBE_TOKENS)]
        for _ in range(NUM_RANDOM_PROBES)
    ]
    return [list(text_ids), *drawn] if text_ids else drawn


def shared_logits(answer: bytes, vocab_size: int) -> Logits:
    """An answer's logits of the tokens that both the base, which has `vocab_size`, and the adapter
    have: they are the first ones."""
    logits = np.frombuffer(answer, np.float32)[:vocab_size]
    known: Logits = logits[np.isfinite(logits)]
    return known


def compare(num_tokens: int, base: Logits, base_again: Logits, adapter: Logits) -> ProbeEffect:
    """The effect on one prompt; the logits are those of `shared_logits`."""
    base, base_again = base[: len(adapter)], base_again[: len(adapter)]
    return ProbeEffect(
        num_tokens=num_tokens,
        max_logit_delta=_max_delta(base, adapter),
        noise_floor=max(_max_delta(base, base_again), ROUNDING * float(np.abs(base).max())),
        kl_divergence=kl_divergence(base, adapter),
        changes_top_token=bool(base.argmax() != adapter.argmax()),
    )


def summarize(probes: Sequence[ProbeEffect]) -> Effect:
    """The effect over all probes."""
    return Effect(
        max_logit_delta=max(probe.max_logit_delta for probe in probes),
        noise_floor=max(probe.noise_floor for probe in probes),
        max_kl_divergence=max(probe.kl_divergence for probe in probes),
        num_top_tokens_changed=sum(probe.changes_top_token for probe in probes),
        probes=tuple(probes),
    )


def _max_delta(left: Logits, right: Logits) -> float:
    return float(np.abs(left.astype(np.float64) - right.astype(np.float64)).max())


def kl_divergence(expected: Logits, found: Logits) -> float:
    """KL(expected ‖ found) of the next token, in nats."""
    log_expected, log_found = _log_softmax(expected), _log_softmax(found)
    return max(0.0, float((np.exp(log_expected) * (log_expected - log_found)).sum()))


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - float(logits.max())
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result
