"""Repeated and scored prompts, as evaluation harnesses use them, compared with PEFT."""

from __future__ import annotations

from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from loraplex.engine.text.tokenizer import Tokenizer
from support.server import Caller, ServerUnderTest

TOLERANCE = 1e-4
PROMPT = "Zwölf Boxkämpfer jagen Viktor über den Deich. " * 3
GO_ON = {"ignore_eos": True}


@pytest.fixture(scope="module")
def tuned(tiny_base: Path, adapters: list[Path]) -> Any:
    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    return PeftModel.from_pretrained(model, adapters[0]).eval()


def expected_logprobs(tuned: Any, token_ids: list[int]) -> torch.Tensor:
    """`[num_tokens, vocab_size]`: row i is of what follows token i."""
    with torch.inference_mode():
        logits: torch.Tensor = tuned(input_ids=torch.tensor([token_ids])).logits[0]
    return logits.log_softmax(-1)


def loglikelihoods(
    caller: Caller, requests: list[tuple[list[int], list[int]]]
) -> list[tuple[float, bool]]:
    """What lm-evaluation-harness's `local-completions` model sends for `loglikelihood`, and what
    it takes from the answer: of each pair the continuation's log-likelihood behind the context,
    and whether it is what greedy decoding gives."""
    payload = {
        "model": "bot",
        "prompt": [context + continuation for context, continuation in requests],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = caller.http.post("/v1/completions", json=payload)
    assert answer.is_success, answer.text
    scores = []
    choices = sorted(answer.json()["choices"], key=itemgetter("index"))
    for choice, (context, _) in zip(choices, requests, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][len(context) : -1]
        top = choice["logprobs"]["top_logprobs"][len(context) : -1]
        is_greedy = all(own == max(best.values()) for own, best in zip(logprobs, top, strict=True))
        scores.append((sum(logprobs), is_greedy))
    return scores


def test_loglikelihoods_of_an_evaluation_harness_are_those_of_transformers(
    resident: Caller, tiny_base: Path, tuned: Any
) -> None:
    tokenizer = Tokenizer(tiny_base)
    texts = [("The sky is", " blue"), ("2 + 2 =", " 4"), (PROMPT, "Was nun?")]
    requests = [(tokenizer.encode(left), tokenizer.encode(right)) for left, right in texts]
    context = tokenizer.encode("greedy")
    for _ in range(3):
        context = [*context, int(expected_logprobs(tuned, context)[-1].argmax())]
    requests.append((context[:-3], context[-3:]))
    found = loglikelihoods(resident, requests)
    for (left, right), (score, is_greedy) in zip(requests, found, strict=True):
        rows = expected_logprobs(tuned, left + right)[len(left) - 1 : -1]
        own = rows[range(len(right)), right]
        assert abs(score - own.sum().item()) < TOLERANCE * len(right)
        assert is_greedy == bool((rows.argmax(-1) == torch.tensor(right)).all())
    assert [greedy for _, greedy in found] == [False, False, False, True]


def test_a_prompt_is_scored_without_output_and_paid_as_input(
    server: ServerUnderTest, resident: Caller, tiny_base: Path, tuned: Any
) -> None:
    token_ids = Tokenizer(tiny_base).encode(PROMPT)
    answer = resident.openai.completions.with_raw_response.create(
        model="bot", prompt=PROMPT, max_tokens=0, echo=True, logprobs=3
    )
    choice, usage = answer.parse().choices[0], answer.parse().usage
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(token_ids), 0)
    row = server.usage_of(answer.headers["x-request-id"], resident)
    assert row is not None
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (len(token_ids), 0, 0)
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    rows = expected_logprobs(tuned, token_ids)
    for index, (_, token_id) in enumerate(pairwise(token_ids)):
        own = rows[index, token_id].item()
        assert abs(logprobs.token_logprobs[index + 1] - own) < TOLERANCE
        best = rows[index].max().item()
        assert abs(max(logprobs.top_logprobs[index + 1].values()) - best) < TOLERANCE


def test_offsets_point_at_the_prompt_and_go_on_with_the_output(
    resident: Caller, tiny_base: Path
) -> None:
    """One token a byte: all bytes of a character stand where it does."""
    tokenizer = Tokenizer(tiny_base)
    for prompt in (PROMPT, tokenizer.encode(PROMPT)):
        choice = resident.openai.completions.create(
            model="bot", prompt=prompt, max_tokens=4, echo=True, logprobs=0, extra_body=GO_ON
        ).choices[0]
        assert choice.text.startswith(PROMPT)
        assert choice.logprobs is not None
        offsets = choice.logprobs.text_offset or []
        expected = [i for i, character in enumerate(PROMPT) for _ in character.encode()]
        assert offsets[: len(expected)] == expected
        assert offsets[len(expected)] == len(PROMPT)
        assert len(offsets) == len(expected) + 4


def test_a_special_token_of_the_prompt_is_part_of_its_text(resident: Caller) -> None:
    prompt = "<|user|>hi<|end|>you"
    choice = resident.openai.completions.create(
        model="bot", prompt=prompt, max_tokens=0, echo=True, logprobs=0
    ).choices[0]
    assert choice.text == prompt
    assert choice.logprobs is not None
    assert choice.logprobs.text_offset == [0, 8, 9, 10, 17, 18, 19]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_stream_repeats_the_prompt_as_the_whole_answer_does(
    resident: Caller, logprobs: int | None
) -> None:
    options: dict[str, Any] = {
        "model": "bot",
        "prompt": [PROMPT, "second"],
        "max_tokens": 5,
        "temperature": 0,
        "echo": True,
        "logprobs": logprobs,
        "extra_body": GO_ON,
    }
    whole = resident.openai.completions.create(**options)
    chunks = list(resident.openai.completions.create(**options, stream=True))
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        if logprobs is None:
            continue
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [
                entry
                for part in parts
                if part.logprobs is not None
                for entry in getattr(part.logprobs, field)
            ]
            expected = getattr(choice.logprobs, field)
            assert len(joined) == len(expected)
            if field in ("tokens", "text_offset"):
                assert joined == expected


def test_each_choice_repeats_the_prompt_that_was_read_once(resident: Caller) -> None:
    answer = resident.openai.completions.create(
        model="bot", prompt=["one", "two"], n=2, seed=3, max_tokens=3, echo=True, logprobs=1
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 6
    for index, choice in enumerate(answer.choices):
        assert choice.text.startswith(("one", "two")[index // 2])
        assert choice.logprobs is not None
        twin = answer.choices[index ^ 1].logprobs
        assert twin is not None
        assert (choice.logprobs.token_logprobs or [])[:3] == (twin.token_logprobs or [])[:3]
        assert (choice.logprobs.token_logprobs or [])[1] < 0


def test_prompt_logprobs_have_vllms_form(resident: Caller, tiny_base: Path, tuned: Any) -> None:
    token_ids = Tokenizer(tiny_base).encode("Hello there")
    answer = resident.openai.completions.create(
        model="bot", prompt="Hello there", max_tokens=1, extra_body={"prompt_logprobs": 2}
    )
    (choice,) = answer.model_dump()["choices"]
    assert choice["logprobs"] is None
    assert not choice["text"].startswith("Hello")
    found = choice["prompt_logprobs"]
    assert found[0] is None
    rows = expected_logprobs(tuned, token_ids)
    tokenizer = Tokenizer(tiny_base)
    for entry, row, token_id in zip(found[1:], rows, token_ids[1:], strict=False):
        own = entry[str(token_id)]
        assert abs(own["logprob"] - row[token_id].item()) < TOLERANCE
        assert own["rank"] == 1 + int((row > row[token_id]).sum())
        assert own["decoded_token"] == tokenizer.token_text(token_id)
        best = {str(token) for token in row.topk(2).indices.tolist()}
        assert set(entry) == {*best, str(token_id)}
        assert sorted(part["rank"] for part in entry.values())[:2] == [1, 2]


def test_a_cut_prompt_is_repeated_as_the_model_reads_it(resident: Caller) -> None:
    choice = resident.openai.completions.create(
        model="bot",
        prompt="never read, this is",
        max_tokens=0,
        echo=True,
        logprobs=0,
        extra_body={"truncate_prompt_tokens": 7},
    ).choices[0]
    assert choice.text == "this is"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == list("this is")
