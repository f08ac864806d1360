"""Requests that forbid tokens, against transformers' own processors of logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from loraplex.engine.errors import InvalidParameter
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from support.engine import LocalEngine

PROMPT = [1, 2, 3] * 6
NUM_TOKENS = 24


def generate_by_transformers(model: Any, **settings: Any) -> list[int]:
    prompt = torch.tensor([PROMPT])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0,
        max_new_tokens=NUM_TOKENS, **settings,
    )  # fmt: skip
    tokens: list[int] = output[0, len(PROMPT) :].tolist()
    return tokens


@pytest.mark.parametrize("speculation", [(), ("ngram",)], ids=["plain", "drafts"])
def test_limits_give_the_tokens_of_transformers(
    tiny_base: Path, tmp_path: Path, speculation: tuple[str, ...]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    engine = LocalEngine(tiny_base, tmp_path, speculation=speculation)
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}

    def answer(**limits: Any) -> list[int]:
        request_id = engine.submit(PROMPT, None, **greedy, **limits)
        engine.run()
        return list(engine.tokens([request_id])[0])

    usual = answer()
    end = usual[3]
    bad_words = ((usual[1],), (usual[4], usual[5]), tuple(usual[6:9]))
    assert answer(bad_words=bad_words) == generate_by_transformers(
        model, bad_words_ids=[list(word) for word in bad_words]
    )
    ended = answer(stop_token_ids=(end,))
    assert ended == usual[: usual.index(end) + 1]
    longer = answer(stop_token_ids=(end,), min_tokens=12)
    assert longer == generate_by_transformers(model, eos_token_id=end, min_new_tokens=12)
    assert end not in longer[:12]
    only = answer(allowed_token_ids=(5, 7, 11))
    assert set(only) <= {5, 7, 11}
    assert len(only) == NUM_TOKENS
    engine.close()


@given(
    st.lists(st.integers(0, 2), max_size=6),
    st.lists(st.integers(0, 2), max_size=3),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=4),
    st.integers(0, 8),
)
def test_a_token_is_forbidden_if_it_would_complete_a_bad_word_of_the_output_or_end_it_too_early(
    output: list[int], drafts: list[int], bad_words: list[tuple[int, ...]], min_tokens: int
) -> None:
    sampling = SamplingParams(
        max_tokens=16, min_tokens=min_tokens, bad_words=tuple(bad_words), stop_token_ids=(9,)
    )
    submitted = GenerationRequest("r", "acme", [0, 1, 2, 0, 1, 2], sampling)
    request = Request(submitted, CacheNamespace("acme", "runtime", None), 11, 0.0, None)
    request.token_ids.extend(output)
    text = [*output, *drafts]
    completing = {
        token
        for token in range(3)
        if any([*text, token][-len(word) :] == list(word) for word in bad_words)
    }
    too_early = {9} if len(text) < min_tokens else set()
    assert set(request.forbidden_tokens(drafts)) == completing | too_early


def test_more_tokens_than_may_come_cannot_be_required() -> None:
    with pytest.raises(InvalidParameter, match="min_tokens"):
        SamplingParams(max_tokens=4, min_tokens=5)
