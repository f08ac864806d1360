"""What drafts of some layers and their verification cost, relative to plain decode steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import inf
from time import perf_counter

from ..model.base_model import BaseModel
from ..model.layer_subset import SKIP, LayerSubset
from .draft_trial import DraftTrial

NUM_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """Of one sequence; 1 is the time of a plain decode step."""

    outside: float
    """A pass through no layer: embedding, norm and output head."""
    verification: Sequence[float]
    """Steps that verify 1, 2, … draft tokens."""
    num_layers: int

    def of_draft_token(self, num_layers: int) -> float:
        """A pass through so many layers, which count as equal."""
        return self.outside + (1.0 - self.outside) * num_layers / self.num_layers

    def best_draft(self, accepted: Sequence[float], num_layers: int) -> tuple[int, float]:
        """The best number of draft tokens, at least one, and tokens per second with it relative to
        plain decoding. `accepted`: see `DraftTrial.accepted`. `num_layers`: those of a draft."""
        drafting = self.of_draft_token(num_layers)
        ratios = [
            (1.0 + sum(accepted[:count])) / (count * drafting + self.verification[count - 1])
            for count in range(1, len(accepted) + 1)
        ]
        best = max(ratios)
        return ratios.index(best) + 1, best


def measure_costs(base: BaseModel, trial: DraftTrial) -> DraftCosts:
    """Times the passes of this base after the trial's longest prefix, kernel by kernel."""
    nothing = LayerSubset(SKIP, base.model, base.config, [])
    passes = [
        partial(trial.run_one, 1),
        partial(trial.run_one, 1, nothing),
        *(partial(trial.run_one, 1 + count) for count in range(1, trial.num_tokens + 1)),
    ]
    plain, outside, *verification = _fastest(passes)
    return DraftCosts(
        min(outside / plain, 1.0),
        # No step is faster than one of fewer tokens: such a difference is noise.
        list(accumulate((max(seconds / plain, 1.0) for seconds in verification), max)),
        base.config.num_hidden_layers,
    )


def _fastest(passes: Sequence[Callable[[], None]]) -> list[float]:
    """The least seconds of each: others on the machine only ever add to them. The passes take
    turns, so that a busy moment does not hit one of them alone."""
    seconds = [inf] * len(passes)
    for _ in range(NUM_ROUNDS):
        for index, run in enumerate(passes):
            begin = perf_counter()
            run()
            seconds[index] = min(seconds[index], perf_counter() - begin)
    return seconds
