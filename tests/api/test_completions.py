"""Completions through the unmodified openai client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types import CompletionChoice

from loraplex.api.formats.logprobs import distinct_spellings
from loraplex.engine.text.tokenizer import Tokenizer
from support.server import Caller

GO_ON = {"ignore_eos": True}


def test_token_ids_are_a_prompt_like_their_text(resident: Caller, tiny_base: Path) -> None:
    token_ids = Tokenizer(tiny_base).encode("Once upon")
    texts = {
        resident.openai.completions.create(
            model="bot", prompt=prompt, max_tokens=8, temperature=0, extra_body=GO_ON
        )
        .choices[0]
        .text
        for prompt in ("Once upon", token_ids, ["Once upon"], [token_ids])
    }
    assert len(texts) == 1


def test_several_prompts_are_answered_in_order(resident: Caller) -> None:
    client = resident.openai
    prompts = ["one", "two", "three"]
    together = client.completions.create(
        model="bot", prompt=prompts, max_tokens=6, n=2, seed=5, extra_body=GO_ON
    )
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3, 4, 5]
    for position, prompt in enumerate(prompts):
        alone = client.completions.create(
            model="bot", prompt=prompt, max_tokens=6, n=2, seed=5, extra_body=GO_ON
        )
        pair = together.choices[2 * position : 2 * position + 2]
        assert [choice.text for choice in pair] == [choice.text for choice in alone.choices]
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(map(len, prompts))
    assert together.usage.completion_tokens == 36


def test_a_stream_says_the_same_as_the_whole_answer(resident: Caller) -> None:
    options = {"model": "bot", "prompt": "Hello", "max_tokens": 10, "temperature": 0, "logprobs": 2}
    client = resident.openai
    whole = client.completions.create(**options, extra_body=GO_ON)  # type: ignore[call-overload]
    chunks = list(client.completions.create(**options, stream=True, extra_body=GO_ON))  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    joined = {
        field: [entry for logprobs in streamed for entry in getattr(logprobs, field)]
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    for field, entries in joined.items():
        # What shares a step moves a logit in its last bits.
        expected = getattr(whole.choices[0].logprobs, field)
        if field == "top_logprobs":
            assert entries == [pytest.approx(top, abs=1e-5) for top in expected]
        elif field == "token_logprobs":
            assert entries == pytest.approx(expected, abs=1e-5)
        else:
            assert entries == expected


def test_offsets_point_at_the_tokens_in_the_text(resident: Caller) -> None:
    answer = resident.openai.completions.create(
        model="tiny", prompt="x", max_tokens=8, temperature=0, logprobs=0, extra_body=GO_ON
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    lengths = [1 if token.startswith("bytes:") else len(token) for token in logprobs.tokens]
    assert logprobs.text_offset == [sum(lengths[:index]) for index in range(len(lengths))]


def test_likely_tokens_that_print_alike_are_told_apart(resident: Caller, tiny_base: Path) -> None:
    tokenizer = Tokenizer(tiny_base)
    spellings = {
        "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(number))
        for number in range(tokenizer.vocab_size)
        if "\ufffd" in tokenizer.token_text(number)
    }
    answer = resident.openai.completions.create(
        model="bot", prompt="x", max_tokens=3, temperature=0, logprobs=20, extra_body=GO_ON
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs or [], logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 20
        assert top[token] == logprob == max(top.values())
        parts = {name for name in top if name.startswith("bytes:")}
        assert len(parts) > 1
        assert parts <= spellings


def test_no_probability_at_all_leaves_the_likeliest_token(resident: Caller) -> None:
    plain, narrow = (
        resident.openai.completions.create(
            model="bot", prompt="x", max_tokens=8, extra_body=GO_ON, **options
        )
        for options in ({"temperature": 0}, {"temperature": 1.5, "top_p": 0, "seed": 3, "stop": ""})
    )
    assert narrow.choices[0].text == plain.choices[0].text


def test_tokens_of_the_same_bytes_are_told_apart_by_their_ids() -> None:
    tokens = {7: b"A", 3: b"\xe2\x80", 9: b"A", 4: b"\xe2\x80", 5: b""}
    assert distinct_spellings(tokens) == {
        7: "A",
        3: r"bytes:\xe2\x80",
        9: "token_id:9",
        4: "token_id:4",
        5: "",
    }


def test_the_same_seed_gives_the_same_text_and_another_another(resident: Caller) -> None:
    first, second, other = (
        resident.openai.completions.create(
            model="bot", prompt="seeded", max_tokens=16, seed=seed, extra_body=GO_ON
        )
        .choices[0]
        .text
        for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other


@pytest.mark.parametrize("stop_token_ids", [[0, 1, 2], list(range(60))])
def test_a_stop_token_is_no_part_of_the_text(
    resident: Caller, tiny_base: Path, stop_token_ids: list[int]
) -> None:
    tokenizer = Tokenizer(tiny_base)
    answer = resident.openai.completions.create(
        model="bot",
        prompt="stop",
        max_tokens=64,
        seed=4,
        extra_body={"stop_token_ids": stop_token_ids, **GO_ON},
    )
    stops = {tokenizer.token_text(token_id) for token_id in stop_token_ids}
    assert not stops & set(answer.choices[0].text)
    assert answer.usage is not None
    if answer.choices[0].finish_reason == "stop":
        assert answer.usage.completion_tokens <= 64


def test_a_bias_forces_a_token(resident: Caller, tiny_base: Path) -> None:
    (token_id,) = Tokenizer(tiny_base).encode("Q")
    answer = resident.openai.completions.create(
        model="bot", prompt="bias", max_tokens=5, logit_bias={str(token_id): 100}
    )
    assert answer.choices[0].text == "QQQQQ"


def test_repeated_prompts_count_cached_tokens(resident: Caller) -> None:
    prompt = "A prompt that is a good deal longer than one block of the KV cache."
    answers = [
        resident.openai.completions.create(model="bot", prompt=prompt, max_tokens=1)
        for _ in range(2)
    ]
    usage = answers[1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 64


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("echo", [False, True])
def test_best_of_returns_the_likeliest_choices_and_charges_all(
    resident: Caller, logprobs: int | None, echo: bool
) -> None:
    client = resident.openai
    ask: dict[str, Any] = {"model": "bot", "prompt": ["one", "two"], "max_tokens": 6, "seed": 5}
    ask |= {"extra_body": GO_ON, "temperature": 1.5}
    every = client.completions.create(**ask, n=5, logprobs=0)
    best = client.completions.create(**ask, n=2, best_of=5, logprobs=logprobs, echo=echo)

    def mean(choice: CompletionChoice) -> float:
        assert choice.logprobs is not None
        token_logprobs = choice.logprobs.token_logprobs or []
        return sum(token_logprobs) / len(token_logprobs)

    ranked = [sorted(every.choices[at : at + 5], key=mean, reverse=True)[:2] for at in (0, 5)]
    expected = [
        (prompt if echo else "") + choice.text
        for prompt, choices in zip(ask["prompt"], ranked, strict=True)
        for choice in choices
    ]
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all((choice.logprobs is None) == (logprobs is None) for choice in best.choices)
    assert best.usage is not None
    assert best.usage.completion_tokens == 2 * 5 * 6
    assert best.usage.prompt_tokens == len("onetwo")


def test_best_of_as_many_as_are_returned_changes_nothing(resident: Caller) -> None:
    ask: dict[str, Any] = {"model": "bot", "prompt": "one", "max_tokens": 6, "seed": 5, "n": 3}
    create = resident.openai.completions.create
    plain = create(**ask, extra_body=GO_ON)
    chosen = create(**ask, best_of=3, extra_body=GO_ON)
    assert chosen.choices == plain.choices
    chunks = list(create(**ask, best_of=3, stream=True, extra_body=GO_ON))
    texts = [
        "".join(c.choices[0].text for c in chunks if c.choices[0].index == i) for i in range(3)
    ]
    assert texts == [choice.text for choice in plain.choices]
