"""The sequences of an order, as the engine gets them: one for each choice of each prompt."""

from __future__ import annotations

from collections.abc import Sequence

from ...adapters.invocation import adapter_start
from ...engine.messages import GenerationRequest, LatencyTargets
from ...engine.sampling_params import SamplingParams
from ...engine.text.tokenizer import Tokenizer
from ...engine.token_journal import SlotCounter
from .engine_sampling import of_choice, with_tokens
from .generation import SequenceSpec
from .objective import Objective
from .order import Order


def sequences_of(
    order: Order,
    objective: Objective,
    *,
    counters: Sequence[SlotCounter],
    tokenizer: Tokenizer,
) -> list[SequenceSpec]:
    """`counters`: one for each. `tokenizer`: that of the order's model."""
    sampling = with_tokens(order.sampling, tokenizer, order.bad_words)
    return [
        SequenceSpec(
            index=index,
            request=_request(order, index, sampling, tokenizer, objective.targets),
            targets_set_by=objective.set_by,
            counter=counter,
            is_first_choice=order.is_first_choice(index),
            text=order.text,
            reasoning=order.reasoning,
        )
        for index, counter in enumerate(counters)
    ]


def _request(
    order: Order,
    index: int,
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    targets: LatencyTargets,
) -> GenerationRequest:
    position, choice = divmod(index, order.num_choices)
    prompt, adapter = order.prompts[position], order.model.adapter
    is_one_of_many = order.num_choices > 1
    return GenerationRequest(
        request_id=order.sequence_id(index),
        tenant_id=order.principal.tenant_id,
        prompt_token_ids=prompt,
        sampling=of_choice(sampling, choice),
        adapter=order.model.key,
        adapter_start=adapter_start(prompt, adapter.invocation_token_ids) if adapter else 0,
        vocab_size=adapter.vocab_size if adapter else None,
        own_end_token_ids=tuple(sorted(tokenizer.own_eos_token_ids)),
        group_id=f"{order.request_id}-{position}" if is_one_of_many else None,
        speculation=order.speculation,
        remembers_output=order.sample is not None,
        kv_policy=order.kv_policy,
        is_endless=order.is_endless,
        priority=order.priority,
        targets=targets,
        is_further=index > 0,
        is_background=order.held_charge is not None,
        tenant_weight=order.principal.tenant_weight,
        pooling=order.pooling,
        num_prompt_logprobs=order.num_prompt_logprobs if choice == 0 else None,
    )
