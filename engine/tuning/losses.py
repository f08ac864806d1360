"""What training makes smaller."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .batches import NOT_TRAINED, Batch


class Loss(NamedTuple):
    """Of one batch."""

    value: Tensor
    """A number, with its gradient."""
    num_correct: Tensor
    num_counted: int
    """Of so many trained tokens, `num_correct` are the most probable ones; of `dpo`, pairs whose
    preferred end has gained more probability than the other one."""


def supervised_loss(model: Any, batch: Batch) -> Loss:
    """The mean negative log-likelihood of the trained tokens."""
    found = _predict(model, batch)
    return Loss(-found.log_probs.mean(), found.is_correct.sum(), len(found.log_probs))


def dpo_loss(model: Any, batch: Batch, beta: float) -> Loss:
    """The loss of Direct Preference Optimization (Rafailov et al. 2023, equation 7).

    The first half of the batch are the preferred ends, the second half the others, in the same
    order. model: a PEFT model, whose base without the adapter is the reference.
    """
    with torch.no_grad(), model.disable_adapter():
        reference = _sums(_predict(model, batch), len(batch.input_ids))
    gains = _sums(_predict(model, batch), len(batch.input_ids)) - reference
    preferred, other = gains.chunk(2)
    losses = -F.logsigmoid(beta * (preferred - other))
    return Loss(losses.mean(), (preferred > other).sum(), len(losses))


class _Predicted(NamedTuple):
    """By trained token, in the order of rows and positions."""

    log_probs: Tensor
    """fp32 `[tokens]`."""
    is_correct: Tensor
    """bool `[tokens]`."""
    rows: Tensor
    """int64 `[tokens]`."""


def _predict(model: Any, batch: Batch) -> _Predicted:
    labels = batch.labels[:, 1:]
    is_trained = labels != NOT_TRAINED
    positions = is_trained.any(dim=0).nonzero().flatten()
    inputs = {"input_ids": batch.input_ids, "use_cache": False}
    if batch.position_ids is not None:
        inputs["position_ids"] = batch.position_ids
    if _chooses_logits(model):  # those of all positions may need more memory than the base
        inputs["logits_to_keep"] = positions
        logits = model(**inputs).logits
    else:
        logits = model(**inputs).logits[:, positions]
    kept = is_trained[:, positions]
    chosen, targets = logits[kept].float(), labels[:, positions][kept]
    log_probs = -F.cross_entropy(chosen, targets, reduction="none")
    return _Predicted(log_probs, chosen.argmax(dim=-1) == targets, kept.nonzero()[:, 0])


def _sums(found: _Predicted, num_rows: int) -> Tensor:
    """fp32 `[rows]`: the log-probability of each row's trained tokens together."""
    sums = torch.zeros(num_rows, device=found.log_probs.device, dtype=torch.float32)
    return sums.index_add(0, found.rows, found.log_probs)


def _chooses_logits(model: Any) -> bool:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "logits_to_keep" in inspect.signature(base.forward).parameters
