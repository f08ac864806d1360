"""The sequences of an order, as the engine gets them: one for each choice of each prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from ...engine.messages import GenerationRequest
from ...engine.sampling_params import SamplingParams
from ...engine.text.tokenizer import Tokenizer
from ...engine.token_journal import SlotCounter
from .generation import SequenceSpec
from .order import Order


def sequences_of(
    order: Order, *, counters: Sequence[SlotCounter], tokenizer: Tokenizer
) -> list[SequenceSpec]:
    """`counters`: one for each. `tokenizer`: that of the order's model."""
    eos = () if order.sampling.ignore_eos else sorted(tokenizer.eos_token_ids)
    sampling = replace(
        order.sampling,
        # Some ends only the tokenizer's files name.
        stop_token_ids=(*order.sampling.stop_token_ids, *eos),
        bad_words=_bad_words(order.bad_words, tokenizer),
    )
    return [
        SequenceSpec(
            index=index,
            request=_request(order, index, sampling, tokenizer),
            counter=counter,
            is_first_choice=order.is_first_choice(index),
            text=order.text,
        )
        for index, counter in enumerate(counters)
    ]


def _request(
    order: Order, index: int, sampling: SamplingParams, tokenizer: Tokenizer
) -> GenerationRequest:
    position, choice = divmod(index, order.num_choices)
    adapter = order.model.adapter
    is_one_of_many = order.num_choices > 1
    return GenerationRequest(
        request_id=order.sequence_id(index),
        tenant_id=order.principal.tenant_id,
        prompt_token_ids=order.prompts[position],
        sampling=replace(sampling, seed=_choice_seed(sampling.seed, choice)),
        adapter=adapter.key if adapter else None,
        vocab_size=adapter.vocab_size if adapter else None,
        own_end_token_ids=tuple(sorted(tokenizer.own_eos_token_ids)),
        group_id=f"{order.request_id}-{position}" if is_one_of_many else None,
        speculation=order.speculation,
        kv_policy=order.kv_policy,
        priority=order.priority,
        is_background=order.held_charge is not None,
        tenant_weight=order.principal.tenant_weight,
        pooling=order.pooling,
        num_prompt_logprobs=order.num_prompt_logprobs if choice == 0 else None,
    )


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each as the beginning of a text and within one: tokens of words often begin with a space."""
    texts = [text for word in words for text in (word.lstrip() or word, f" {word.lstrip()}")]
    encoded = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return tuple(dict.fromkeys(tuple(token_ids) for token_ids in encoded if token_ids))


def _choice_seed(seed: int | None, choice: int) -> int | None:
    """The first choice has the caller's seed, so that `n` does not change it."""
    if seed is None or choice == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
