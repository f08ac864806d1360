"""Trains the demo's weights from scratch: `python -m loraplex.api.demo.recipe OUT`.

A base with a million parameters learns to answer requests with an English echo. Then PEFT trains
one LoRA adapter per style on it. Budgets are in steps, not seconds, so a slow machine produces the
same weights, up to rounding. Running it needs the `engine` extra; importing it needs nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from .task import Style

BASE_NAME = "demo-base"
"""The base's name in requests and in the adapters' configuration."""


@dataclass(frozen=True, slots=True)
class BaseRecipe:
    """The base model's shape and training; every number was found by a run that failed."""

    seed: int = 1
    vocab_size: int = 2_048
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    max_model_len: int = 512
    initializer_range: float = 0.04
    copy_steps: int = 250
    """In this number of first steps only lists are learned, at full rates; then the mixture."""
    steps: int = 1_100
    batch_size: int = 24
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    muon_iterations: int = 4
    adamw_lr: float = 3e-3


@dataclass(frozen=True, slots=True)
class AdapterRecipe:
    """One adapter's training: LoRA on every linear layer."""

    style: Style
    seed: int
    steps: int
    rank: int = 16
    alpha: int = 32
    batch_size: int = 12
    adamw_lr: float = 3e-3


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides the weights, apart from the code; raise `version` when that changes."""

    version: int
    base: BaseRecipe
    adapters: tuple[AdapterRecipe, ...]


RECIPE = Recipe(
    version=1,
    base=BaseRecipe(),
    adapters=(
        AdapterRecipe(Style.SQL, seed=11, steps=1_000),
        # JSON puts every word in quotes, which changes its token: it has the most to learn.
        AdapterRecipe(Style.JSON, seed=12, steps=1_200),
        AdapterRecipe(Style.PIRATE, seed=14, steps=1_500),
    ),
)


def main() -> None:
    """Train everything and write it to the folder named on the command line."""
    from .training import train_all

    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m loraplex.api.demo.recipe OUT")
    train_all(RECIPE, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
