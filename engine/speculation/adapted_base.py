"""The base with one adapter, as the model under which heads are trained."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from peft import PeftModel

from ...adapters.errors import AdapterRejected
from ...adapters.export import CONFIG_NAME, WEIGHTS_NAME
from ...adapters.peft_config import PeftConfig, parse_peft_config
from ..errors import InvalidParameter


def with_adapter(model: Any, folder: Path) -> Any:
    """This transformers model, computing with the PEFT adapter in the folder: its linear layers are
    replaced in place. It is frozen.

    Raises InvalidParameter if the adapter cannot be read, generates no text, does not act on all
    tokens, has tokens of its own, or is another base's.
    """
    _check(_config(folder))
    if not (folder / WEIGHTS_NAME).is_file():  # PEFT would look for a pickle, then on the network
        raise _refusal(folder, f"{WEIGHTS_NAME} is missing")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            adapted = PeftModel.from_pretrained(model, str(folder))
    except Exception as exc:  # whatever PEFT says of an adapter that does not fit
        raise _refusal(folder, f"it does not fit the base: {exc}") from exc
    return adapted.requires_grad_(False).eval().get_base_model()


def _config(folder: Path) -> PeftConfig:
    try:
        return parse_peft_config((folder / CONFIG_NAME).read_bytes())
    except OSError as exc:
        raise _refusal(folder, f"{CONFIG_NAME} cannot be read: {exc.strerror}") from exc
    except AdapterRejected as exc:
        raise _refusal(folder, str(exc)) from exc


def _check(config: PeftConfig) -> None:
    if config.is_classifier:
        raise InvalidParameter("adapter", "a classifier generates no text to predict")
    if config.invocation:
        raise InvalidParameter("adapter", "heads are not trained for an activated LoRA")
    if config.added_tokens:
        raise InvalidParameter("adapter", "requests whose adapter has added tokens get no drafts")


def _refusal(folder: Path, reason: str) -> InvalidParameter:
    return InvalidParameter("adapter", f"{folder}: {reason}")
