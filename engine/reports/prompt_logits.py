"""The logits of prompts under a base that is loaded for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..config import EngineConfig
from ..errors import InvalidParameter
from ..model.admission import run_paged
from ..model.whole_base import load_base_model


def prompt_logits(
    engine: EngineConfig, prompts: Sequence[Sequence[int]]
) -> list[npt.NDArray[np.float32]]:
    """`[num_tokens, vocab_size]` of each prompt, at all its positions.

    The base's memory is free again when this returns. Raises as `load_base_model` does, and
    InvalidParameter for tokens that it does not have.
    """
    base = load_base_model(engine)
    if max(map(max, prompts)) >= base.vocab_size:
        raise InvalidParameter("prompt", "the model's vocabulary is smaller than the tokenizer's")
    sequences = [list(prompt) for prompt in prompts]
    logits = run_paged(base.model, base.kv_shapes, sequences, base.kv_format)
    return [each.float().cpu().numpy() for each in logits]
