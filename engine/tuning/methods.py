"""The methods of training. Torch-free."""

from __future__ import annotations

from enum import StrEnum


class Method(StrEnum):
    """What a recipe's `method` may be, in the words of OpenAI's API."""

    SUPERVISED = "supervised"
    DPO = "dpo"

    @property
    def num_ends(self) -> int:
        """Sequences of an example: `dpo` has the preferred and the other one in the same step. The
        reference's activations are freed before those of the step begin, so they add nothing."""
        return 2 if self is Method.DPO else 1
