"""Searches the layers that a base's drafts can do without (Draft & Verify, Zhang et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ..model.base_model import BaseModel
from ..model.layer_subset import SKIP, LayerSubset
from .draft_costs import DraftCosts
from .draft_trial import DraftTrial

LayerSet = frozenset[int]


class Forecast(NamedTuple):
    """What drafts without some layers of the base would give."""

    left_out: LayerSet
    accepted: Sequence[float]
    """See `DraftTrial.accepted`."""
    num_tokens: int
    """The best number of draft tokens."""
    ratio: float
    """Tokens per second of one stream, relative to plain decoding."""


def forecast(base: BaseModel, trial: DraftTrial, costs: DraftCosts, left_out: LayerSet) -> Forecast:
    """Measures one set of layers."""
    kept = [layer for layer in range(costs.num_layers) if layer not in left_out]
    accepted = trial.accepted(LayerSubset(SKIP, base.model, base.config, kept))
    return Forecast(left_out, accepted, *costs.best_draft(accepted, len(kept)))


def last_layers(num_layers: int, count: int) -> LayerSet:
    """Those that early exit leaves out."""
    return frozenset(range(num_layers - count, num_layers))


def search(
    num_layers: int, width: int, measured: Callable[[LayerSet], Forecast]
) -> Iterator[Forecast]:
    """The best set found of 1, 2, … all but one of the layers.

    A beam search: each of the `width` best sets of a size is tried with every other layer. The sets
    of early exit take part, so what is found is never worse than they are in this measurement.
    """
    beam = [LayerSet()]
    for size in range(1, num_layers):
        sets = {left_out | {layer} for left_out in beam for layer in range(num_layers)}
        grown = {each for each in sets if len(each) == size} | {last_layers(num_layers, size)}
        ranked = _ranked(map(measured, sorted(grown, key=sorted)))
        yield ranked[0]
        beam = [each.left_out for each in ranked[:width]]


def _ranked(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Best first; of equal ones, the one of which more draft tokens are accepted."""
    return sorted(forecasts, key=lambda each: (-each.ratio, -sum(each.accepted)))
