"""The sampling fields of a body, and what the engine is told of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loraplex.api.schemas.completions import CompletionBody
from loraplex.engine.generation_defaults import GenerationDefaults
from loraplex.engine.grammars.spec import GrammarKind, GrammarSpec
from loraplex.engine.sampling_params import SamplingParams


def sampling_of(**fields: Any) -> SamplingParams:
    body = CompletionBody.model_validate_json(json.dumps({"model": "m", "prompt": "x", **fields}))
    return body.sampling(max_tokens=9, num_logprobs=None, grammar=None)


def test_every_field_reaches_the_engine_under_its_own_name() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.3,
        "top_k": 7,
        "top_p": 0.8,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": -0.5,
        "seed": -3,
        "ignore_eos": True,
        "min_tokens": 4,
    }
    told = sampling_of(
        logit_bias={"5": -100.0, "6": 2.5},
        stop_token_ids=[8, 3],
        allowed_token_ids=[8, 9],
        **fields,
    )
    assert told == SamplingParams(
        max_tokens=9,
        logit_bias={5: -100.0, 6: 2.5},
        stop_token_ids=(8, 3),
        allowed_token_ids=(8, 9),
        **fields,
    )


@pytest.mark.parametrize("fields", [{}, {"top_k": -1, "logit_bias": {}, "ignore_eos": False}])
def test_what_is_left_out_changes_no_distribution(fields: dict[str, Any]) -> None:
    assert sampling_of(**fields) == SamplingParams(max_tokens=9)


def test_a_zero_is_no_missing_value() -> None:
    fields = {"temperature": 0.0, "top_p": 0.0, "min_p": 0.0, "seed": 0}
    assert sampling_of(**fields) == SamplingParams(max_tokens=9, **fields)  # type: ignore[arg-type]


def test_what_is_left_out_is_as_the_base_declares() -> None:
    declared = GenerationDefaults(0.6, 0.95, 20, 0.01, 1.05)

    def told(**fields: Any) -> SamplingParams:
        body = CompletionBody.model_validate({"model": "m", "prompt": "x", **fields})
        return body.sampling(max_tokens=9, num_logprobs=None, grammar=None, defaults=declared)

    assert told() == SamplingParams(
        9, temperature=0.6, top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.05
    )
    chosen = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert told(**chosen) == SamplingParams(9, temperature=0.0)


def test_a_route_adds_the_length_the_logprobs_and_the_grammar() -> None:
    grammar = GrammarSpec(GrammarKind.REGEX, "a+")
    body = CompletionBody.model_validate({"model": "m", "prompt": "x"})
    told = body.sampling(max_tokens=2, num_logprobs=3, grammar=grammar)
    assert told == SamplingParams(max_tokens=2, num_logprobs=3, grammar=grammar)
