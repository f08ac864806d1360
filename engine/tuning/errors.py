"""Why an adapter cannot be trained, with the codes of `messages.Failed`."""

from __future__ import annotations


class TuningError(Exception):
    """The job ends without an adapter."""

    code = "training_failed"


class BaseNotTunable(TuningError):
    """The base cannot be trained with the values that are served."""

    code = "base_not_tunable"


class InvalidRecipe(TuningError):
    """The recipe does not fit the base, or contradicts itself."""

    code = "invalid_recipe"


class InvalidTrainingData(TuningError):
    """A line of the data is wrong."""

    code = "invalid_training_data"

    def __init__(self, message: str, line: int | None = None) -> None:
        """line: from 1; None: the file as a whole is wrong."""
        super().__init__(message)
        self.line = line


class InsufficientTrainingMemory(TuningError):
    """A step needs more memory than the process may take."""

    code = "out_of_memory"
