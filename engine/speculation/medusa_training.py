"""Training Medusa heads for a base that stays as it is (Cai et al. 2024, Medusa-1).

Text in the base's own words teaches most: heads propose what the base says, not what is true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from ..errors import UnsupportedModel
from ..model.embedding_and_head import declare_ends
from ..model.output_head import head_inputs
from .medusa_heads import MedusaHeads, untrained_heads
from .training_texts import TrainingText

_IGNORED = -100
_WARM_UP = 0.05
_MEASURED_ROWS = 8


@dataclass(frozen=True, slots=True)
class MedusaRecipe:
    """The heads' shape and their training."""

    num_heads: int = 3
    num_layers: int = 1
    num_steps: int = 600
    batch_size: int = 16
    learning_rate: float = 1e-3
    decay: float = 0.8
    """Head j's loss counts `decay ** (j + 1)`: what lies further ahead is drafted worse anyway."""
    seed: int = 0


def train_heads(
    model: Any,
    texts: Sequence[TrainingText],
    recipe: MedusaRecipe,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> MedusaHeads:
    """Heads in fp32 for this transformers model, which is not changed; on its device.

    `on_step` is told the number of steps done and the last one's loss. Raises UnsupportedModel if
    the model's output head is not one that serving can watch.
    """
    ends = declare_ends(model)
    if ends.head is None:
        raise UnsupportedModel("; ".join(ends.refused.values()))
    heads = untrained_heads(
        model.get_output_embeddings(), num_heads=recipe.num_heads, num_layers=recipe.num_layers
    ).float()
    optimizer = AdamW(heads.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    for step, batch in zip(range(recipe.num_steps), _batches(texts, recipe), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step / recipe.num_steps)
        losses = head_losses(heads, *_states_and_labels(model, batch))
        loss = sum(recipe.decay ** (j + 1) * own for j, own in enumerate(losses))
        assert isinstance(loss, Tensor)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step(step + 1, loss.item())
    return heads.requires_grad_(False)


def head_losses(heads: MedusaHeads, hidden_states: Tensor, labels: Tensor) -> list[Tensor]:
    """Each head's mean cross entropy.

    `hidden_states [batch, length, hidden_size]`; `labels` int64 `[batch, length]`: the token at
    each position, -100 where it is not learned. Head j at position p proposes that at p + 2 + j.
    """
    logits = heads(hidden_states.flatten(0, 1)).unflatten(1, labels.shape)
    return [_mean_loss(own[:, : -(2 + j)], labels[:, 2 + j :]) for j, own in enumerate(logits)]


@torch.no_grad()
def head_accuracies(model: Any, heads: MedusaHeads, texts: Sequence[TrainingText]) -> list[float]:
    """Per head the share of the texts' learned tokens that it proposes right."""
    num_right = [0] * heads.num_heads
    num_labels = [0] * heads.num_heads
    for batch in _parts(texts, _MEASURED_ROWS):
        hidden_states, labels = _states_and_labels(model, batch)
        best = heads(hidden_states.flatten(0, 1)).argmax(-1).unflatten(1, labels.shape)
        for j, own in enumerate(best):
            wanted = labels[:, 2 + j :]
            num_right[j] += int((own[:, : -(2 + j)] == wanted).sum())
            num_labels[j] += int((wanted != _IGNORED).sum())
    return [right / max(all_, 1) for right, all_ in zip(num_right, num_labels, strict=True)]


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    total = cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED, reduction="sum"
    )
    return total / (labels != _IGNORED).sum().clamp(min=1)


def _states_and_labels(model: Any, texts: Sequence[TrainingText]) -> tuple[Tensor, Tensor]:
    """What the output head meets at every position, fp32, and what `head_losses` takes beside."""
    width = max(len(text.token_ids) for text in texts)
    tokens = torch.zeros(len(texts), width, dtype=torch.int64)
    labels = torch.full((len(texts), width), _IGNORED)
    for row, (token_ids, num_context) in enumerate(texts):
        tokens[row, : len(token_ids)] = torch.tensor(token_ids)
        labels[row, num_context : len(token_ids)] = torch.tensor(token_ids[num_context:])
    # Padding on the right needs no mask: nothing looks ahead.
    with torch.no_grad(), head_inputs(model) as seen:
        model(input_ids=tokens.to(model.device), use_cache=False)
    return seen[0].float(), labels.to(model.device)


def _batches(
    texts: Sequence[TrainingText], recipe: MedusaRecipe
) -> Iterator[Sequence[TrainingText]]:
    """Without end, each pass over the texts in another order."""
    rng = Random(recipe.seed)
    while True:
        yield from _parts(rng.sample(texts, len(texts)), recipe.batch_size)


def _parts(texts: Sequence[TrainingText], size: int) -> Iterator[Sequence[TrainingText]]:
    for start in range(0, len(texts), size):
        yield texts[start : start + size]


def _schedule(progress: float) -> float:
    """The share of the learning rate: a short warm-up, then a straight line down."""
    return min(progress / _WARM_UP + 0.01, 1.0 - progress)
