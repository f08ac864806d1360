"""What the training of all draft heads shares: batches of texts, and steps down a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from .training_texts import TrainingText

IGNORED = -100
"""The label of a token that is not learned."""
MEASURED_ROWS = 8
_WARM_UP = 0.05
OnStep = Callable[[int, float], None]
"""Called with the number of completed steps and the last loss."""


@dataclass(frozen=True, slots=True)
class HeadSchedule:
    """How long and how fast heads are trained."""

    num_steps: int = 600
    batch_size: int = 16
    learning_rate: float = 1e-3
    decay: float = 0.8
    """The loss of the n-th draft token is weighted by `decay ** n`, because later tokens are
    predicted worse anyway."""
    seed: int = 0

    def train(
        self,
        heads: nn.Module,
        texts: Sequence[TrainingText],
        losses: Callable[[Sequence[TrainingText]], Sequence[Tensor]],
        on_step: OnStep,
    ) -> None:
        """Change the heads. `losses`: of a batch, for the first, second, … draft token."""
        optimizer = AdamW(heads.parameters(), lr=self.learning_rate, weight_decay=0.0)
        for step, batch in zip(range(self.num_steps), self._batches(texts), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * _share_of_rate(step / self.num_steps)
            loss = torch.stack(
                [self.decay ** (j + 1) * own for j, own in enumerate(losses(batch))]
            ).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            on_step(step + 1, loss.item())

    def _batches(self, texts: Sequence[TrainingText]) -> Iterator[Sequence[TrainingText]]:
        """Without end, each pass over the texts in another order."""
        rng = Random(self.seed)
        while True:
            yield from parts(rng.sample(texts, len(texts)), self.batch_size)


def padded(texts: Sequence[TrainingText]) -> tuple[Tensor, Tensor]:
    """int64 `[batch, length]` each: tokens, and labels, which are the tokens to learn and IGNORED
    elsewhere. Padding on the right needs no mask: nothing looks ahead."""
    width = max(len(text.token_ids) for text in texts)
    tokens = torch.zeros(len(texts), width, dtype=torch.int64)
    labels = torch.full((len(texts), width), IGNORED, dtype=torch.int64)
    for row, (token_ids, num_context) in enumerate(texts):
        tokens[row, : len(token_ids)] = torch.tensor(token_ids)
        labels[row, num_context : len(token_ids)] = torch.tensor(token_ids[num_context:])
    return tokens, labels


def parts(texts: Sequence[TrainingText], size: int) -> Iterator[Sequence[TrainingText]]:
    for start in range(0, len(texts), size):
        yield texts[start : start + size]


def _share_of_rate(progress: float) -> float:
    """A short warm-up, then a straight line down."""
    return min(progress / _WARM_UP + 0.01, 1.0 - progress)
