"""Every quantized format of a base that is divided among ranks, beside one rank.

The base is the demo's or a small one of another family, with the values of the format. One rank and
the ranks of threads run without fused layers, so that they differ in the order of sums alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.api.demo.manifest import WEIGHTS
from loraplex.engine.config import EngineConfig, KvDtype, Quantization
from loraplex.engine.model import sharded_base, whole_base
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.parity_bound import (
    BYTE_INPUTS_TOLERANCE,
    ROUNDED_INPUTS_TOLERANCE,
)
from loraplex.engine.model.whole_base import load_base_model
from loraplex.kernels import linear_packing
from support.divided import RankLogits, adapters_of, held_tokens
from support.models import make_adapter
from support.peft_parity import mixed_logits
from support.quantized_bases import QuantizedBase, makers
from support.ranks import run_sharded

EXACT_BOUND = 1e-4
"""Of a logit's error where products are summed in fp32, as for a base that is not quantized."""
ROUNDED_BOUND = 1e-3
"""Where int8 and int4 codes are multiplied as integers: relative to the largest logit, and at
most `MAX_ROUNDED_ERROR`. Inputs have 16 bits then, and ranks cut the 128 inputs that are rounded
together otherwise. In small models the rounding changes logits by up to 6e-4 of the largest
(decision 55)."""
MAX_ROUNDED_ERROR = 0.005
KV_BOUNDS = {KvDtype.INT8: 0.005, KvDtype.INT4: 0.085, KvDtype.INT2: 0.43}
"""Ranks give a few numbers on the edge between two codes the other one, which is one step away. A
step of int4 is 17 and one of int2 85 times that of int8."""
OPTIONS = {
    "quantization": Quantization.INT4,
    "quantization_group_size": 48,
    "quantization_exclude": ("*.k_proj",),
}
"""Groups that end within a rank, and siblings of different forms."""
BYTES = (Quantization.INT8, "ct-int8", "ct-w8a8", "bnb-int8")
"""Those whose layers are products of bytes on a CPU that multiplies these fast."""
SEED = 0
"""Of a batch's adapters."""


def targets_of(base: BaseModel) -> list[str]:
    """The names of its linear layers, as adapters target them."""
    slices = [part for fused in base.projections for part in fused.projection.slices]
    return sorted({part.name.rpartition(".")[2] for part in slices})


def save_demo(folder: Path) -> None:
    """Write the demo's base in fp32."""
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS / "base", dtype=torch.float32)
    model.save_pretrained(folder)


class Case(NamedTuple):
    """A format and how its products are computed."""

    name: str
    make: Callable[[Path, Path], QuantizedBase]
    settings: Mapping[str, Any] = {}
    """Of the engine."""
    multiplies_bytes: bool = False
    save: Callable[[Path], object] = save_demo
    """Writes the dense base to a folder."""


class Comparison(NamedTuple):
    """Of the logits of several ranks with those of one."""

    max_error: float
    bound: float
    tokens: int
    different: int
    """Tokens that are the best of the one and not of the other."""
    near_ties: int
    """Those of them whose two best logits differ by less than the bound."""
    errors: tuple[float, ...]
    """The largest error of each sequence of each batch."""

    @property
    def is_within(self) -> bool:
        return self.max_error <= self.bound and self.different == self.near_ties


def cases() -> dict[str, Case]:
    """Every format by name."""
    made = [Case(name, make) for name, make in makers().items()]
    of_bytes = {str(form) if form in makers() else f"--quantize {form}" for form in BYTES}
    made += [
        case._replace(name=f"{case.name} (bytes)", multiplies_bytes=True)
        for case in made
        if case.name in of_bytes
    ]
    made += [
        Case(f"--quantize-embeddings {form}", _unquantized, {"embedding_quantization": form})
        for form in Quantization
        if form is not Quantization.NONE
    ]
    made += [Case(f"--kv-dtype {form}", _unquantized, {"kv_dtype": form}) for form in KV_BOUNDS]
    made += [Case("--quantize int4, groups of 48, without k_proj", _unquantized, OPTIONS)]
    return {case.name: case for case in made}


def compare(
    case: Case,
    num_ranks: int,
    folder: Path,
    *,
    seeds: Sequence[int] = (SEED,),
    num_stages: int = 1,
) -> Comparison:
    """The logits of mixed batches: base rows, an adapter of all linear layers, one of two kinds of
    them, and one of the experts and their routers.

    `num_ranks`: of each stage. `seeds`: those of the adapters of each batch.
    """
    dense = folder / "dense"
    case.save(dense)
    with patch.dict(os.environ, XDG_CACHE_HOME=str(folder)):  # where files of GGUF become folders
        base = case.make(dense, folder / "served")
        config = EngineConfig(
            str(base.served),
            device="cpu",
            dtype="float32",
            **{"quantization": base.quantization, **case.settings},
        )
        with _computing(multiplies_bytes=case.multiplies_bytes):
            alone = load_base_model(config)
            batches = _Batches(base.plain, _settings(alone), folder, seeds)
            expected = batches.logits(alone, 0)
            of_ranks = run_sharded(
                config,
                num_ranks,
                lambda part, rank: RankLogits(held_tokens(part), batches.logits(part, 1 + rank)),
                num_stages=num_stages,
            )[:num_ranks]
        return _compare(config, batches, alone, expected, of_ranks)


def _unquantized(dense: Path, _folder: Path) -> QuantizedBase:
    return QuantizedBase(dense, dense)


def _settings(base: BaseModel) -> list[dict[str, Any]]:
    """Of a batch's adapters."""
    if base.moe_layers:
        return adapters_of(base)
    targets = targets_of(base)
    return [{"r": 2, "target_modules": targets}, {"r": 5, "target_modules": targets[:2]}]


class _Batches:
    """The same batches for each rank, and the adapters in them."""

    def __init__(
        self, base: Path, settings: Sequence[dict[str, Any]], folder: Path, seeds: Sequence[int]
    ) -> None:
        self._folder = folder
        self._adapters = [
            [
                make_adapter(
                    base,
                    folder / f"{seed}-{lora['r']}",
                    seed=seed + lora["r"],
                    scale=0.1,
                    **lora,
                )
                for lora in settings
            ]
            for seed in seeds
        ]

    def logits(self, base: BaseModel, place: int) -> list[Tensor]:
        """`[tokens, vocab]` of each sequence of each batch. `place`: no two ranks' are the same."""
        found = []
        for index, adapters in enumerate(self._adapters):
            blocks = self._folder / f"blocks-{index}-{place}"
            blocks.mkdir()
            found += mixed_logits(base, adapters, blocks)
        return found


def _compare(
    config: EngineConfig,
    batches: _Batches,
    alone: BaseModel,
    expected: list[Tensor],
    of_ranks: list[RankLogits],
) -> Comparison:
    largest = max(logits.abs().max().item() for logits in expected)
    if config.kv_dtype in KV_BOUNDS:
        bound = KV_BOUNDS[config.kv_dtype]
    elif alone.self_test_bound > BYTE_INPUTS_TOLERANCE:
        bound = _rounding_of_bytes(config, batches, expected)
    elif alone.self_test_bound == ROUNDED_INPUTS_TOLERANCE:
        bound = min(ROUNDED_BOUND * largest, MAX_ROUNDED_ERROR)
    else:
        bound = EXACT_BOUND
    errors = tuple(map(max, zip(*(ours.errors(expected) for ours in of_ranks), strict=True)))
    best, other = (torch.cat(logits) for logits in (expected, of_ranks[0].logits))
    differs = best.argmax(dim=1) != other.argmax(dim=1)
    first, second = best.topk(2, dim=1).values.T
    is_near = first - second < bound
    return Comparison(
        max(errors),
        bound,
        len(best),
        int(differs.sum()),
        int((differs & is_near).sum()),
        errors,
    )


def _rounding_of_bytes(config: EngineConfig, batches: _Batches, expected: list[Tensor]) -> float:
    """What rounding inputs to 8 bits changes on one rank.

    An input on the edge between two codes may have the other one on the ranks. Then other inputs of
    later layers do too. They are rounded anew, and no further from the unrounded ones than those of
    one rank.
    """
    with _computing(multiplies_bytes=False):
        unrounded = batches.logits(load_base_model(config), -1)
    pairs = zip(unrounded, expected, strict=True)
    return max((exact - logits).abs().max().item() for exact, logits in pairs)


@contextmanager
def _computing(*, multiplies_bytes: bool) -> Iterator[None]:
    """Products of bytes count as fast or not, which is measured otherwise. No layers are fused."""
    with (
        patch.object(linear_packing, "prefers_bytes", partial(bool, multiplies_bytes)),
        patch.object(sharded_base, "prefers_bytes", partial(bool, multiplies_bytes)),
        patch.object(whole_base, "fuses_layers", lambda device: False),
    ):
        yield
