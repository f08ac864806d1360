"""Activated LoRA from the push to the answer, against PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraplex.engine.text.tokenizer import Tokenizer
from support.activated import TOLERANCE, Reference, make_activated
from support.server import Caller, ServerUnderTest

INVOCATIONS = {"certainty": "Certainty:", "rewrite": "Rewrite:"}
CONTEXT = "A long conversation, of which nothing is to be computed again. " * 2


@pytest.fixture(scope="module")
def folders(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, tokenizer = tmp_path_factory.mktemp("activated"), Tokenizer(tiny_base)
    return {
        name: make_activated(tiny_base, folder / name, tokenizer.encode(text), seed=seed)
        for seed, (name, text) in enumerate(INVOCATIONS.items())
    }


@pytest.fixture(scope="module")
def caller(server: ServerUnderTest, folders: dict[str, Path]) -> Caller:
    caller = server.make_caller("activated")
    for name, folder in folders.items():
        caller.push(folder, name)
    return caller


def complete(caller: Caller, model: str, prompt: str) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1}
    answer = caller.http.post("/v1/completions", json=body)
    assert answer.is_success, answer.text
    content: dict[str, Any] = answer.json()
    return content


def first_logprob(answer: dict[str, Any]) -> float:
    logprob: float = answer["choices"][0]["logprobs"]["token_logprobs"][0]
    return logprob


def num_cached(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_a_version_says_from_which_tokens_on_it_acts(caller: Caller, tiny_base: Path) -> None:
    version = caller.http.get("/v1/adapters/certainty").json()["versions"][0]
    assert "activated_lora" in version["features"]
    expected = Tokenizer(tiny_base).encode(INVOCATIONS["certainty"])
    assert version["report"]["invocation_token_ids"] == expected
    assert version["state"] == "ready"


def test_answers_are_those_of_peft_and_share_the_context(
    caller: Caller, tiny_base: Path, folders: dict[str, Path]
) -> None:
    reference, tokenizer = Reference.of(tiny_base, list(folders.values())), Tokenizer(tiny_base)
    prompts = [CONTEXT, *(CONTEXT + text for text in INVOCATIONS.values())]
    expected_hit = len(tokenizer.encode(CONTEXT)) // 16 * 16
    for index, prompt in enumerate(prompts):
        for model, folder in folders.items():
            answer = complete(caller, model, prompt)
            row = reference.logprobs(folder, tokenizer.encode(prompt), [0])[0]
            assert abs(first_logprob(answer) - row.max().item()) < TOLERANCE
            assert not index or num_cached(answer) >= expected_hit


def test_a_message_may_be_the_invocation(caller: Caller) -> None:
    """The chat template has text around it, whose tokens the adapter sees too."""
    messages = [
        {"role": "user", "content": CONTEXT},
        {"role": "user", "content": INVOCATIONS["certainty"]},
    ]
    answers = {}
    for model in ("certainty", "rewrite"):
        body = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}
        answer = caller.http.post("/v1/chat/completions", json={**body, "logprobs": True})
        assert answer.is_success, answer.text
        (entry,) = answer.json()["choices"][0]["logprobs"]["content"]
        answers[model] = entry["logprob"]
    assert answers["certainty"] != answers["rewrite"], "only one of them was invoked"
