"""The offline classes give what the server gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraplex import LLM, SamplingParams
from loraplex.api.formats.logprobs import spelled
from loraplex.engine.text.tokenizer import Tokenizer
from support.server import Caller, ServerUnderTest

PROMPTS = ["hello", "The quick brown fox", "a"]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there"}]

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 24},
    {"seed": 7, "max_tokens": 16, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {
        "temperature": 0.0,
        "max_tokens": 24,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "min_tokens": 4,
        "ignore_eos": True,
    },
    {"temperature": 0.0, "max_tokens": 12, "logit_bias": {70: 5.0}, "bad_words": ["E"]},
    {"temperature": 0.0, "max_tokens": 12, "allowed_token_ids": [65, 66, 67], "stop": ["B"]},
    {
        "temperature": 0.0,
        "max_tokens": 12,
        "allowed_token_ids": [65, 66, 67],
        "stop_token_ids": [66],
        "include_stop_str_in_output": True,
    },
    {"temperature": 0.0, "max_tokens": 12, "structured_outputs": {"regex": "[a-f]{3,9}"}},
    {"temperature": 0.0, "max_tokens": 12, "skip_special_tokens": False, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def caller(server: ServerUnderTest, adapters: list[Path]) -> Caller:
    """A tenant with the adapters `bot-0` to `bot-2`."""
    caller = server.make_caller("offline-twin")
    for index, folder in enumerate(adapters):
        caller.push(folder, f"bot-{index}")
    return caller


def served(caller: Caller, path: str, **body: Any) -> Any:
    answer = caller.http.post(f"/v1/{path}", json=body)
    assert answer.is_success, answer.text
    return answer.json()


def test_one_batch_of_all_adapters_has_the_servers_tokens(
    llm: LLM, caller: Caller, adapters: list[Path], tiny_base: Path
) -> None:
    tokenizer = Tokenizer(tiny_base)
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    folders = [None, *adapters] * len(PROMPTS)
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=0, ignore_eos=True)
    outputs = llm.generate(prompts, params, adapter=folders)
    models = ["tiny", "bot-0", "bot-1", "bot-2"] * len(PROMPTS)
    for prompt, model, output in zip(prompts, models, outputs, strict=True):
        sent = {"temperature": 0.0, "max_tokens": 24, "logprobs": 0, "ignore_eos": True}
        expected = served(caller, "completions", model=model, prompt=prompt, **sent)["choices"][0]
        (actual,) = output.outputs
        assert actual.text == expected["text"]
        assert actual.finish_reason == expected["finish_reason"]
        assert actual.logprobs is not None
        found = [
            (spelled(tokenizer.token_bytes(token)), each[token].logprob)
            for token, each in zip(actual.token_ids, actual.logprobs, strict=True)
        ]
        logprobs = expected["logprobs"]
        assert [token for token, _ in found] == logprobs["tokens"]
        assert [value for _, value in found] == pytest.approx(logprobs["token_logprobs"], abs=1e-4)
    texts = [output.outputs[0].text for output in outputs[:4]]
    assert len(set(texts)) == 4, "each adapter has an effect of its own"


def test_a_composition_has_the_servers_tokens(
    llm: LLM, caller: Caller, adapters: list[Path]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    weighted = {str(adapters[0]): 1.0, str(adapters[1]): -0.5}
    both, first = llm.generate(["hello"] * 2, params, adapter=[weighted, adapters[0]])
    sent = {"prompt": "hello", "temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    expected = served(caller, "completions", model="bot-0+bot-1:-0.5", **sent)
    assert both.outputs[0].text == expected["choices"][0]["text"]
    assert both.outputs[0].text != first.outputs[0].text
    (alone,) = llm.generate("hello", params, adapter={adapters[0]: 1})
    assert alone.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("fields", SAMPLED, ids=lambda fields: "-".join(fields))
def test_sampling_parameters_mean_the_same(
    llm: LLM, caller: Caller, adapters: list[Path], fields: dict[str, Any]
) -> None:
    sent = {**fields, "logit_bias": {str(k): v for k, v in fields.get("logit_bias", {}).items()}}
    expected = served(caller, "completions", model="bot-0", prompt=PROMPTS, **sent)["choices"]
    outputs = llm.generate(PROMPTS, SamplingParams(**fields), adapter=adapters[0])
    for choice, output in zip(expected, outputs, strict=True):
        assert output.outputs[0].text == choice["text"]
        assert output.outputs[0].finish_reason == choice["finish_reason"]


def test_several_choices_of_a_seed_are_the_same(
    llm: LLM, caller: Caller, adapters: list[Path]
) -> None:
    fields: dict[str, Any] = {"n": 3, "seed": 11, "max_tokens": 8}
    expected = served(caller, "completions", model="bot-1", prompt="hello", **fields)["choices"]
    (output,) = llm.generate("hello", SamplingParams(**fields), adapter=adapters[1])
    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert [each.text for each in output.outputs] == [each["text"] for each in expected]
    assert len({each.text for each in output.outputs}) == 3


def test_log_probabilities_of_the_prompt_are_the_same(llm: LLM, caller: Caller) -> None:
    fields: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 2}
    choice = served(caller, "completions", model="tiny", prompt="hello", **fields)["choices"][0]
    (output,) = llm.generate("hello", SamplingParams(**fields))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    expected = choice["prompt_logprobs"]
    assert len(output.prompt_logprobs) == len(expected) == len("hello")
    for actual, entry in zip(output.prompt_logprobs[1:], expected[1:], strict=True):
        assert actual is not None
        assert {str(token): each.rank for token, each in actual.items()} == {
            token: each["rank"] for token, each in entry.items()
        }
        assert [each.logprob for each in actual.values()] == pytest.approx(
            [entry[str(token)]["logprob"] for token in actual], abs=1e-4
        )


def test_a_conversation_has_the_servers_prompt_and_answer(
    llm: LLM, caller: Caller, adapters: list[Path]
) -> None:
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16}
    expected = served(caller, "chat/completions", model="bot-2", messages=CHAT, **fields)
    (output,) = llm.chat(CHAT, SamplingParams(**fields), adapter=adapters[2])
    assert output.outputs[0].text == expected["choices"][0]["message"]["content"]
    assert len(output.prompt_token_ids) == expected["usage"]["prompt_tokens"]
    assert len(output.outputs[0].token_ids) == expected["usage"]["completion_tokens"]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_same(
    llm: LLM, caller: Caller, adapters: list[Path], pooling: Any
) -> None:
    body = {"model": "bot-0", "input": PROMPTS, "pooling": pooling}
    expected = served(caller, "embeddings", **body)["data"]
    outputs = llm.embed(PROMPTS, adapter=adapters[0], pooling=pooling)
    for each, output in zip(expected, outputs, strict=True):
        assert output.outputs.embedding == pytest.approx(each["embedding"], abs=1e-5)
