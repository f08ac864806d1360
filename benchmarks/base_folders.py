"""Loads the folders of `support.base_folders` with the product's own code."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraplex.engine.checkpoint.files import locate_base
from loraplex.engine.checkpoint.packed_format import find_packed_format
from loraplex.engine.checkpoint.stored_weights import dense, stored_weights
from loraplex.engine.checkpoint.weights import load_config
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.text.tokenizer import Tokenizer
from support.base_folders import BASE_FOLDERS, BaseFolder, Templates, make_base_folder
from support.paged import paged_logits

TOKENS = tuple(range(3, 43))
TOLERANCE = 1e-4
"""Of the largest logit, all being float32."""


class WronglyServed(Exception):
    """A folder was served with logits other than transformers' own."""


def folders() -> list[dict[str, str | None]]:
    """What becomes of each: served with transformers' own logits, or refused with a code."""
    with tempfile.TemporaryDirectory(prefix="loraplex-bases-") as home:
        templates = Templates(Path(home, "templates"))
        return [
            try_folder(case, templates, Path(home, str(number)))
            for number, case in enumerate(BASE_FOLDERS)
        ]


def try_folder(case: BaseFolder, templates: Templates, path: Path) -> dict[str, str | None]:
    """The answer to one folder; `got` is the exception's name if it is neither answer."""
    make_base_folder(case, templates, path)
    code = None
    try:
        load_and_compare(path)
        got = "served"
    except UnsupportedModel as exc:
        got, code = "refused", exc.code
    except Exception as exc:
        got = f"crashed: {type(exc).__name__}"
    expected = "served" if case.code is None else "refused"
    if got == expected == "refused" and code != case.code:
        got = f"refused, not as {case.code}"
    return {"name": case.name, "expected": expected, "got": got, "code": code}


def load_and_compare(path: Path) -> None:
    """Load a base as `serve` does and compare its logits with those of transformers' own model.

    Raises a subclass of UnsupportedModel, WronglyServed, or whatever the loading fails with.
    """
    folder = locate_base(str(path))
    Tokenizer(folder)
    base = load_base_model(EngineConfig(str(folder), device="cpu", dtype="float32"))
    theirs = (_dequantized(folder) if find_packed_format(folder) else _as_stored(path)).eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([TOKENS]), use_cache=False).logits[0]
    error = (paged_logits(base, [list(TOKENS)])[0] - expected).abs().max()
    if not error <= TOLERANCE * expected.abs().max():
        raise WronglyServed(f"its logits differ by {error:.1e}")


def _as_stored(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return model


def _dequantized(folder: Path) -> PreTrainedModel:
    """transformers' model of the values that the codes stand for."""
    config, cpu = load_config(folder), torch.device("cpu")
    values = {
        name: dense(weight.read(), dtype=torch.float32, device=cpu)
        for name, weight in stored_weights(folder).items()
    }
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).from_pretrained(
        None, config=config, state_dict=values, attn_implementation="eager"
    )
    return model
