"""Response schemas of the routes that are open to every caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..contract.answer_model import AnswerModel


@dataclass(frozen=True, slots=True)
class Health(AnswerModel):
    """The check succeeded; otherwise the response is an error."""

    status: Literal["ok", "ready"]
