"""The recipe of a job: what the caller asked for, with every default resolved."""

from __future__ import annotations

import secrets
from typing import TypeVar

from ...engine.messages import EngineInfo
from ...engine.tuning.messages import Recipe
from ..contract.errors import ApiError
from ..schemas.tuning import (
    MAX_SEED,
    Auto,
    DpoHyperparametersBody,
    HyperparametersBody,
    LoraBody,
    TuningJobBody,
)

Number = TypeVar("Number", int, float)

LEARNING_RATES = {"supervised": 2e-4, "dpo": 2e-5}
"""Of a multiplier of 1."""
NUM_EPOCHS = 3
BATCH_SIZE = 8
DPO_BETA = 0.1
MAX_TOKENS = 2048
CHECKPOINT_STEPS = 50


def resolve_recipe(body: TuningJobBody, info: EngineInfo) -> Recipe:
    """The recipe for this base. Raises ApiError with the field that the base or the method does
    not allow."""
    method, lora = body.method.type if body.method else "supervised", body.lora or LoraBody()
    asked = _hyperparameters(body, method)
    multiplier = _or_default(asked.learning_rate_multiplier, 1.0)
    beta = asked.beta if isinstance(asked, DpoHyperparametersBody) else "auto"
    return Recipe(
        method=method,
        rank=lora.rank,
        alpha=2.0 * lora.rank if lora.alpha is None else lora.alpha,
        targets=_targets(lora, info),
        is_rslora=lora.rslora,
        is_dora=lora.dora,
        num_epochs=_or_default(asked.n_epochs, NUM_EPOCHS),
        batch_size=_or_default(asked.batch_size, BATCH_SIZE),
        learning_rate=LEARNING_RATES[method] * multiplier,
        is_packed=_is_packed(lora, method),
        max_tokens=_max_tokens(lora, info),
        seed=secrets.randbelow(MAX_SEED + 1) if body.seed is None else body.seed,
        dpo_beta=_or_default(beta, DPO_BETA),
        checkpoint_steps=CHECKPOINT_STEPS,
    )


def _or_default(value: Auto | Number, default: Number) -> Number:
    return default if isinstance(value, str) else value


def _hyperparameters(body: TuningJobBody, method: str) -> HyperparametersBody:
    """The method's, from one place."""
    given = {"supervised": body.method.supervised, "dpo": body.method.dpo} if body.method else {}
    for name, options in given.items():
        if name != method and options is not None:
            param = f"method.{name}"
            raise ApiError("invalid_parameter", f"{param}: the method is {method}", param=param)
    options = given.get(method)
    own = options.hyperparameters if options else None
    if body.hyperparameters is None:
        return own or HyperparametersBody()
    if own is not None or method != "supervised":
        message = "hyperparameters: set them in `method` only"
        raise ApiError("invalid_parameter", message, param="hyperparameters")
    return body.hyperparameters


def _targets(lora: LoraBody, info: EngineInfo) -> tuple[str, ...]:
    served = {part.name.rpartition(".")[2] for part in info.layout.slices}
    for target in lora.targets or ():
        if target not in served:
            message = f"lora.targets: {target!r} is none of {', '.join(sorted(served))}"
            raise ApiError("invalid_parameter", message, param="lora.targets")
    return tuple(lora.targets or ())


def _is_packed(lora: LoraBody, method: str) -> bool:
    if method == "dpo" and lora.packing:
        message = "lora.packing: pairs of answers are not packed"
        raise ApiError("invalid_parameter", message, param="lora.packing")
    return lora.packing


def _max_tokens(lora: LoraBody, info: EngineInfo) -> int:
    if lora.max_tokens is None:
        return min(MAX_TOKENS, info.max_model_len)
    if lora.max_tokens > info.max_model_len:
        message = f"lora.max_tokens: the base serves at most {info.max_model_len}"
        raise ApiError("invalid_parameter", message, param="lora.max_tokens")
    return lora.max_tokens
