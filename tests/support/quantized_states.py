"""Small bases with states in every quantized form, and adapters of their layers with states."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from support.families import STATES, save_family
from support.models import make_adapter
from support.quantized_bases import Maker, QuantizedBase

_DIFFERENCES: dict[str, Any] = {
    "vocab_size": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "mamba_dt_rank": 32,  # whole words of codes of `dt_proj`
    "linear_num_value_heads": 8,  # and of zero points of `in_proj_ba`
}
"""With weights twice as wide, rounding the inputs changes the logits by more."""


class StatesBase(NamedTuple):
    """Which layers of a type take adapters here."""

    targets: tuple[str, ...]
    """All around the states, and some of attention."""
    biased: str
    """Of these one whose `lora_B` has a bias."""


FEATURES = ("lora", "dora", "rslora", "lora_bias", "ends")
BASES: dict[str, StatesBase] = {
    "falcon_h1": StatesBase(("in_proj", "q_proj", "o_proj"), "in_proj"),
    "jamba": StatesBase(("in_proj", "x_proj", "out_proj", "q_proj"), "x_proj"),
    "lfm2": StatesBase(("in_proj", "out_proj", "q_proj"), "out_proj"),
    "qwen3_next": StatesBase(("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"), "in_proj_ba"),
}
"""State spaces beside attention and before it, convolutions, and linear attention with experts.
PEFT refuses Falcon-H1's `out_proj`."""


def save_states_base(name: str, folder: Path) -> Path:
    """The dense base of this name."""
    model_type, differences = STATES[name]
    return save_family(folder, model_type, {**differences, **_DIFFERENCES})


def make_states_base(name: str, maker: Maker, folder: Path) -> QuantizedBase:
    """The base of this name, with one of `quantized_bases.makers`."""
    return maker(save_states_base(name, folder / "dense"), folder / "served")


def make_states_adapters(
    name: str, plain: Path, folder: Path, features: Collection[str] = FEATURES
) -> dict[str, Path]:
    """Adapters of PEFT with what it can train on these layers and at the ends."""
    base = BASES[name]
    first, *others = base.targets
    settings: dict[str, dict[str, Any]] = {
        "lora": {"target_modules": list(base.targets)},
        "dora": {"target_modules": list(base.targets), "use_dora": True},
        "rslora": {
            "target_modules": [first],
            "use_rslora": True,
            "rank_pattern": {first: 7},
            "alpha_pattern": {first: 3},
        },
        "lora_bias": {"target_modules": [base.biased], "lora_bias": True},
        "ends": {
            "target_modules": others,
            "modules_to_save": ["lm_head"],
            "trainable_token_indices": [7, 3, 101],
        },
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says which features it cannot merge
        return {
            feature: make_adapter(plain, folder / feature, seed=seed, scale=0.1, **lora)
            for seed, (feature, lora) in enumerate(settings.items())
            if feature in features
        }
