"""The order of a step's sequences."""

from __future__ import annotations

import random

import torch

from loraplex.engine.batch import ScheduledSequence
from loraplex.engine.block_pool import padding_class
from loraplex.engine.inputs import Span, make_inputs
from loraplex.engine.kv_groups import one_group
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.prefix_cache import CacheNamespace
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams

BLOCK = 4


def sequence(num_computed: int, num_known: int, num_draft: int = 0) -> ScheduledSequence:
    submitted = GenerationRequest("r", "acme", [1] * num_computed, SamplingParams(), None)
    namespace = CacheNamespace("acme", "runtime", None)
    request = Request(submitted, namespace, 0, 0.0, None)
    request.num_computed_tokens = num_computed
    return ScheduledSequence(request, num_known + num_draft, num_draft)


def test_decodes_and_verifications_of_similar_size_stand_together() -> None:
    rng = random.Random(0)
    sequences = [sequence(rng.randrange(1, 120), 1, rng.randrange(9)) for _ in range(60)]
    sequences.sort(key=lambda entry: entry.place(BLOCK))
    tables = [[list(range(1, 40))] for _ in sequences]
    spans = [
        Span([1] * entry.num_tokens, entry.request.num_computed_tokens, table)
        for entry, table in zip(sequences, tables, strict=True)
    ]
    inputs = make_inputs(
        spans, groups=one_group(1, 40), block_size=BLOCK, device=torch.device("cpu")
    )
    classes = {
        (padding_class(entry.num_tokens), padding_class(-(-entry.context_len // BLOCK)))
        for entry in sequences
    }
    assert len(inputs.attention[0].groups) == len(classes) < 30


def test_prompts_come_last_in_the_order_they_had() -> None:
    prompts = [sequence(0, 30), sequence(8, 3), sequence(0, 17)]
    decodes = [sequence(9, 1, 4), sequence(50, 1)]
    ordered = sorted([*prompts, *decodes], key=lambda entry: entry.place(BLOCK))
    assert ordered == [*reversed(decodes), *prompts]
