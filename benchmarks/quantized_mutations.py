"""Damages quantized checkpoints of every format and reads what is left with the product's code."""

from __future__ import annotations

import random
import resource
import shutil
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from loraplex.engine.checkpoint.files import check_base
from loraplex.engine.checkpoint.stored_weights import stored_weights
from loraplex.engine.errors import UnsupportedModel
from loraplex.kernels.linear_packing import pack_linear
from support.quantized_checkpoints import FORMATS, Format, write_weights
from support.quantized_mutations import mutate

SIZE = (64, 96)


class Mutations(NamedTuple):
    """What became of damaged checkpoints."""

    tried: int
    outcomes: Counter[str]
    """By the error's code; served: what was damaged did not matter, or only values changed."""
    crashes: list[str]
    """Errors that are no refusals: the mutation, the format and the end of the traceback."""
    peak_growth_mib: int
    """Of the process's memory. The checkpoints take kilobytes."""


def try_mutations(
    folder: Path, seeds: Iterable[int], formats: Iterable[Format] = tuple(FORMATS.values())
) -> Mutations:
    """One mutation for each seed, of each format in turn, in this empty folder."""
    whole = {form.name: folder / form.name for form in formats}
    generator = torch.Generator().manual_seed(0)
    for name, path in whole.items():
        write_weights(path, {"layer.weight": torch.randn(SIZE, generator=generator)}, FORMATS[name])
    before, outcomes, crashes = _peak_mib(), Counter[str](), []
    names, damaged = list(whole), folder / "damaged"
    for number, seed in enumerate(seeds):
        name = names[number % len(names)]
        shutil.copytree(whole[name], damaged)
        way = mutate(damaged, random.Random(seed))
        try:
            read_all(damaged)
            outcomes["served"] += 1
        except UnsupportedModel as exc:
            outcomes[exc.code] += 1
        except Exception:
            crashes.append(f"{way}, {name}, seed {seed}: {traceback.format_exc(limit=-2)}")
        shutil.rmtree(damaged)
    tried = sum(outcomes.values()) + len(crashes)
    return Mutations(tried, outcomes, crashes, _peak_mib() - before)


def read_all(folder: Path) -> None:
    """Read every weight as loading a base does, and multiply with it.

    Raises a subclass of UnsupportedModel.
    """
    check_base(folder)
    for weight in stored_weights(folder).values():
        values = weight.read()
        if not isinstance(values, Tensor) or values.ndim == 2:
            pack_linear(values)(torch.ones(2, values.shape[1]))


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
