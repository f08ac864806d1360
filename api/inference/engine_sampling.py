"""What the engine needs beside a request's own sampling parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from ...engine.sampling_params import SamplingParams
from ...engine.text.tokenizer import Tokenizer


def with_tokens(
    sampling: SamplingParams, tokenizer: Tokenizer, bad_words: Sequence[str]
) -> SamplingParams:
    """The parameters with the tokens that end an output and those of words it may not have."""
    eos = () if sampling.ignore_eos else sorted(tokenizer.eos_token_ids)
    return replace(
        sampling,
        # Some ends only the tokenizer's files name.
        stop_token_ids=(*sampling.stop_token_ids, *eos),
        bad_words=_bad_words(bad_words, tokenizer),
    )


def of_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of one of several choices. The first one has the caller's seed, so that `n`
    does not change it."""
    if sampling.seed is None or choice == 0:
        return sampling
    digest = hashlib.sha256(f"{sampling.seed}/{choice}".encode()).digest()
    return replace(sampling, seed=int.from_bytes(digest[:8], "little", signed=True))


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each as the beginning of a text and within one: tokens of words often begin with a space."""
    texts = [text for word in words for text in (word.lstrip() or word, f" {word.lstrip()}")]
    encoded = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return tuple(dict.fromkeys(tuple(token_ids) for token_ids in encoded if token_ids))
