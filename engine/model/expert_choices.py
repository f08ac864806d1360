"""The experts that a dense forward pass chooses, which a paged one in a half type is then given.

Where two experts' scores are nearly equal, the rounding of a half type decides between them, and
the token's logits differ by far more than rounding although no operation is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..shards.rank_sums import RankSums
from ..shards.stage_links import StageLinks
from .experts import are_served

MAX_REPLACED = 0.25
"""The largest share of a test's choices that rounding may explain."""


class ExpertChoices(NamedTuple):
    """Of some tokens in one layer."""

    experts: Tensor
    """`[num_tokens, top_k]`, integers."""
    weights: Tensor
    """`[num_tokens, top_k]`: the factor of each expert's output."""


LayerChoices = Mapping[str, ExpertChoices]
"""One sequence's, by the path of the layer's experts."""
Choose = Callable[[str, ExpertChoices], ExpertChoices]
"""From a layer's path and what its router chose, what its experts get."""


@contextmanager
def choosing(model: nn.Module, choose: Choose) -> Iterator[None]:
    """While entered, the experts of every layer get the choices that `choose` returns."""
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if are_served(module):
                stack.enter_context(_choosing(path, module, choose))
        yield


@contextmanager
def recording(model: nn.Module) -> Iterator[dict[str, ExpertChoices]]:
    """While entered, adds the choices of a forward pass, which calls every layer once."""
    recorded: dict[str, ExpertChoices] = {}

    def record(path: str, choices: ExpertChoices) -> ExpertChoices:
        recorded[path] = choices
        return choices

    with choosing(model, record):
        yield recorded


def of_first_rank(ranks: RankSums) -> Choose:
    """Chooses what the first rank of a stage has chosen. All ranks of the stage must call it."""

    def choose(_path: str, choices: ExpertChoices) -> ExpertChoices:
        return ExpertChoices(*(ranks.gather(each)[0] for each in choices))

    return choose


def tell_choices(recorded: Sequence[LayerChoices], links: StageLinks) -> list[LayerChoices]:
    """What rank 0 has recorded of each sequence. Every rank of every stage calls it at the same
    point; those of the others are not read. Weights are fp32."""
    own = [
        {path: [each.tolist() for each in choices] for path, choices in of_layers.items()}
        for of_layers in recorded
    ]
    told = json.loads(links.tell_all(json.dumps(own).encode())[0])
    return [
        {
            path: ExpertChoices(torch.tensor(experts), torch.tensor(weights, dtype=torch.float32))
            for path, (experts, weights) in of_layers.items()
        }
        for of_layers in told
    ]


class ReplacedChoices:
    """Replaces the choices of a batch's tokens that differ from the recorded ones."""

    def __init__(self, sequences: Sequence[LayerChoices]) -> None:
        self._sequences = sequences
        self._rows: list[tuple[int, slice]] = []
        self._num_choices = 0
        self._num_replaced = 0

    @property
    def share(self) -> float:
        """Of all choices so far, those that were replaced."""
        return self._num_replaced / max(self._num_choices, 1)

    def begin_step(self, rows: Sequence[tuple[int, slice]]) -> None:
        """The next batch has these positions of these sequences, in this order."""
        self._rows = list(rows)

    def choose(self, path: str, choices: ExpertChoices) -> ExpertChoices:
        """The recorded choice where another set of experts was chosen, else the router's own."""
        recorded = [self._sequences[index][path] for index, _ in self._rows]
        parts = [
            (layer.experts[positions], layer.weights[positions])
            for layer, (_, positions) in zip(recorded, self._rows, strict=True)
        ]
        experts, weights = (
            torch.cat(each).to(own.dtype)
            for each, own in zip(zip(*parts, strict=True), choices, strict=True)
        )
        ours, theirs = choices.experts.sort().values, experts.sort().values
        differs = (ours != theirs).any(dim=-1, keepdim=True)
        self._num_choices += len(differs)
        self._num_replaced += int(differs.sum())
        return ExpertChoices(
            torch.where(differs, experts, choices.experts),
            torch.where(differs, weights, choices.weights),
        )


@contextmanager
def _choosing(path: str, module: nn.Module, choose: Choose) -> Iterator[None]:
    inner, replaced = module.forward, module.__dict__.get("forward")

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        chosen = choose(path, ExpertChoices(top_k_index, top_k_weights))
        output = inner(hidden_states, *chosen)
        assert isinstance(output, Tensor)
        return output

    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if replaced is not None:
            module.__dict__["forward"] = replaced
