"""Whether a base computes packed examples as if each were alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..model.parity_bound import SELF_TEST_TOLERANCE
from .base import TunableBase
from .batches import make_batch
from .errors import InvalidRecipe
from .tokens import TrainedTokens

_NUM_TOKENS = 8


def check_packing(base: TunableBase) -> None:
    """Raises InvalidRecipe if tokens of an example change the logits of the next one. A layer with
    states, and attention that ignores where examples begin, do so."""
    model = base.model.eval()
    first, second = (_example(base, seed) for seed in (0, 1))
    alone = _logits(base, model, [second], is_packed=False)
    packed = _logits(base, model, [first, second], is_packed=True)[_NUM_TOKENS:]
    error = (packed - alone).abs().max() / alone.abs().max()
    if not error <= SELF_TEST_TOLERANCE[base.model.dtype]:
        raise InvalidRecipe("this base mixes packed examples: train without packing")


def _example(base: TunableBase, seed: int) -> TrainedTokens:
    generator = torch.Generator().manual_seed(seed)
    highest = min(base.tokenizer.vocab_size, base.model.config.vocab_size)
    token_ids = torch.randint(highest, (_NUM_TOKENS,), generator=generator).tolist()
    return TrainedTokens(token_ids, [False] * _NUM_TOKENS)


@torch.no_grad()
def _logits(
    base: TunableBase, model: Any, sequence: list[TrainedTokens], *, is_packed: bool
) -> Tensor:
    """fp32 `[tokens, vocabulary]`."""
    batch = make_batch([sequence], is_packed=is_packed)
    inputs = {"input_ids": batch.input_ids.to(base.device), "use_cache": False}
    if batch.position_ids is not None:
        inputs["position_ids"] = batch.position_ids.to(base.device)
    logits: Tensor = model(**inputs).logits[0].float()
    return logits
