"""The output of a step with given logits."""

from __future__ import annotations

from torch import Tensor

from loraplex.engine.execution.runner import StepOutput
from loraplex.engine.execution.sampler import finite_rows
from loraplex.engine.transfers import HostCopy


def output_of(logits: Tensor, hidden_states: Tensor | None = None) -> StepOutput:
    return StepOutput(logits, HostCopy(finite_rows(logits)), hidden_states)
