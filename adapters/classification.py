"""What the outputs of an adapter's classification head mean.

The head is an auxiliary tensor. PEFT's configuration does not name its labels: they are the field
`id2label` of the configuration of the model that was trained, as is `problem_type`, and they are
read from `adapter_config.json` under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeGuard

from .errors import AdapterRejected

TASK = "SEQ_CLS"
"""PEFT's task type of a classifier."""
HEAD_NAMES = ("classifier", "score")
"""The modules that PEFT adds to `modules_to_save` for this task, whether a model has them or not.
"""
HEAD = "score"
"""The one that is served: transformers' name of a head that reads the last hidden state."""
LABELS_FIELD = "id2label"
PROBLEM_FIELD = "problem_type"
FIELDS = (LABELS_FIELD, PROBLEM_FIELD)
MAX_LABELS = 1024
MAX_LABEL_CHARACTERS = 256
MAX_CHARACTERS = 1 << 16
"""Of all labels of an adapter."""


class ProblemType(StrEnum):
    """What transformers trains a head for."""

    REGRESSION = "regression"
    SINGLE_LABEL = "single_label_classification"
    MULTI_LABEL = "multi_label_classification"


class Task(StrEnum):
    """What an adapter answers with."""

    GENERATE = "generate"
    """Text."""
    CLASSIFY = "classify"
    """The outputs of its classification head."""

    @classmethod
    def of(cls, *, is_classifier: bool) -> Task:
        return cls.CLASSIFY if is_classifier else cls.GENERATE


@dataclass(frozen=True, slots=True)
class Classification:
    """The meaning of a head's outputs."""

    labels: tuple[str, ...]
    """One for each output."""
    problem_type: ProblemType | None = None
    """None: the configuration does not name one."""


def parse_labels(value: object) -> tuple[str, ...]:
    """The labels of the configuration's field, by their number; empty if it is unset.

    Raises AdapterRejected.
    """
    if value is None:
        return ()
    if not isinstance(value, dict) or not 0 < len(value) <= MAX_LABELS:
        raise _malformed(LABELS_FIELD, f"is not an object with 1 to {MAX_LABELS} labels")
    labels = [value.get(str(number)) for number in range(len(value))]
    if None in labels:
        raise _malformed(LABELS_FIELD, "does not number its labels from 0 on")
    texts = tuple(label for label in labels if _is_label(label))
    if len(texts) < len(labels):
        raise _malformed(
            LABELS_FIELD,
            f"has a label that is not 1 to {MAX_LABEL_CHARACTERS} printable characters",
        )
    if sum(map(len, texts)) > MAX_CHARACTERS:
        raise _malformed(LABELS_FIELD, f"has more than {MAX_CHARACTERS} characters in its labels")
    return texts


def parse_problem_type(value: object) -> ProblemType | None:
    """Raises AdapterRejected."""
    if value is None:
        return None
    if not isinstance(value, str) or value not in list(ProblemType):
        raise _malformed(PROBLEM_FIELD, f"is not one of {', '.join(ProblemType)}")
    return ProblemType(value)


def labels_of(named: tuple[str, ...], num_labels: int) -> tuple[str, ...]:
    """The labels of a head with so many outputs; without names those of transformers.

    Raises AdapterRejected if there are others than the head has.
    """
    if named and len(named) != num_labels:
        raise AdapterRejected(
            "config_contradiction",
            f"{LABELS_FIELD} has {len(named)} labels; the head has {num_labels}",
            pointer=f"/{LABELS_FIELD}",
        )
    return named or tuple(f"LABEL_{number}" for number in range(num_labels))


def classification_of(report: Mapping[str, Any]) -> Classification | None:
    """That of a stored intake report; None: the adapter is no classifier."""
    stored = report.get("classification")
    if stored is None:
        return None
    return Classification(tuple(stored["labels"]), parse_problem_type(stored["problem_type"]))


def _is_label(label: object) -> TypeGuard[str]:
    return isinstance(label, str) and 0 < len(label) <= MAX_LABEL_CHARACTERS and label.isprintable()


def _malformed(field: str, fault: str) -> AdapterRejected:
    return AdapterRejected("malformed_config", f"{field} {fault}", pointer=f"/{field}")
