"""What the steps of a run take beside the loaded base: an estimate of the most, before the first.

A step keeps, for its backward pass, what each linear layer reads and writes, the scores of
attention, and the logits with their gradients. All is counted in float32, and each sequence as long
as the longest example. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT_BYTES = 4
COPIES_OF_LINEARS = 2
"""Of what a linear layer reads and writes: the base's part and the adapter's."""
COPIES_OF_SCORES = 2
"""Before and after the softmax."""
COPIES_OF_LOGITS = 6
"""Logits, their shifted copy and their logarithms, and the gradients of each."""
COPIES_OF_PARAMETERS = 5
"""Beside the parameters: gradients, both moments of AdamW, and what a checkpoint and an update hold
for a moment."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """What decides the memory of a step."""

    linear_features: int
    """Inputs and outputs of all linear layers of the decoder, added up."""
    vocab_size: int
    num_scores: int
    """Heads of all layers: each has a score for each pair of tokens of a sequence."""
    num_parameters: int
    """Trained ones."""

    def bytes(self, *, num_rows: int, width: int) -> int:
        """The most that a step of these sequences takes. `width`: tokens of each."""
        per_token = (
            COPIES_OF_LINEARS * self.linear_features
            + COPIES_OF_LOGITS * self.vocab_size
            + COPIES_OF_SCORES * self.num_scores * width
        )
        activations = num_rows * width * per_token
        return FLOAT_BYTES * (activations + COPIES_OF_PARAMETERS * self.num_parameters)
