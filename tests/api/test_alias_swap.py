"""Moving an alias: no answer mixes old and new weights, and none is cut off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.server import Caller

PROMPT = "A prompt of several blocks that the old version has answered more than once before."
GO_ON = {"ignore_eos": True}


def ask(caller: Caller, model: str, max_tokens: int = 24) -> tuple[str, str, int]:
    """The answer, the version that gave it, and how many prompt tokens were cached."""
    answer = caller.openai.completions.create(
        model=model, prompt=PROMPT, max_tokens=max_tokens, temperature=0, extra_body=GO_ON
    )
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    assert details is not None
    return answer.choices[0].text, answer.model, details.cached_tokens or 0


def set_alias(caller: Caller, version: int, **body: Any) -> None:
    answer = caller.http.put("/v1/adapters/bot/aliases/prod", json={"version": version, **body})
    assert answer.is_success, answer.text


def test_a_moved_alias_answers_as_a_cold_server_and_reuses_no_block_of_the_old_version(
    make_caller: Callable[[], Caller], adapters: list[Path]
) -> None:
    caller, cold = make_caller(), make_caller()
    caller.push(adapters[0], "bot", aliases=["prod"])
    old = ask(caller, "bot")
    assert ask(caller, "bot")[2] > 0, "the prefix cache was meant to be warm"

    caller.push(adapters[1], "bot")
    set_alias(caller, 2)
    text, model, num_cached = ask(caller, "bot")

    assert num_cached == 0
    assert model == f"{caller.slug}/bot@2"
    assert text != old[0]
    cold.push(adapters[1], "bot")
    assert text == ask(cold, "bot")[0]
    set_alias(caller, 1)
    assert ask(caller, "bot")[0] == old[0]


def test_a_running_stream_ends_on_the_version_it_began_with(
    make_caller: Callable[[], Caller], adapters: list[Path]
) -> None:
    caller = make_caller()
    caller.push(adapters[0], "bot", aliases=["prod"])
    caller.push(adapters[1], "bot")
    expected = ask(caller, "bot@1", max_tokens=120)[0]

    stream = caller.openai.completions.create(
        model="bot",
        prompt=PROMPT,
        max_tokens=120,
        temperature=0,
        stream=True,
        extra_body=GO_ON,
    )
    chunks = [next(stream)]
    set_alias(caller, 2)
    chunks += list(stream)

    assert {chunk.model for chunk in chunks} == {f"{caller.slug}/bot@1"}
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected
    assert ask(caller, "bot")[1] == f"{caller.slug}/bot@2"
