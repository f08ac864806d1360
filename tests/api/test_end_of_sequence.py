"""The end of an output, also at tokens that only the tokenizer's files declare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.engine.text.tokenizer import Tokenizer
from support.models import make_tiny_llama
from support.server import ServerUnderTest, serving


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose own configuration names no end-of-sequence token."""
    path = make_tiny_llama(tmp_path_factory.mktemp("base"), eos_token_id=None)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((path / name).read_text()).get("eos_token_id") is None
    return path


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    with serving(base, tmp_path_factory.mktemp("server"), "--served-model-name", "tiny") as server:
        yield server


def test_the_tokenizers_own_end_of_sequence_ends_the_output(
    server: ServerUnderTest, base: Path
) -> None:
    caller = server.make_caller("acme")
    (eos,) = Tokenizer(base).eos_token_ids

    def ask(**changes: object) -> tuple[str, str, int]:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 6, "logit_bias": {str(eos): 100}}
        answer = caller.http.post("/v1/completions", json={**body, **changes})
        assert answer.status_code == 200, answer.text
        choice, usage = answer.json()["choices"][0], answer.json()["usage"]
        return choice["text"], choice["finish_reason"], usage["completion_tokens"]

    assert ask() == ("", "stop", 1)
    assert ask(ignore_eos=True) == ("", "length", 6)
    assert ask(min_tokens=3)[1:] == ("stop", 4)
    shown = Tokenizer(base).decode([eos], skip_special_tokens=False)
    assert ask(include_stop_str_in_output=True)[0] == ""
    assert ask(include_stop_str_in_output=True, skip_special_tokens=False)[0] == shown


def test_completions_list_the_logprobs_of_the_token_that_ended_them(
    server: ServerUnderTest, base: Path
) -> None:
    caller = server.make_caller("globex")
    (eos,) = Tokenizer(base).eos_token_ids
    body = {"model": "tiny", "prompt": "xy", "max_tokens": 1, "logit_bias": {str(eos): 100}}

    def tokens(**changes: object) -> list[str]:
        answer = caller.http.post("/v1/completions", json={**body, "logprobs": 1, **changes})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"])
        assert found["text_offset"][-1] == len(choice["text"])
        return list(found["tokens"])

    end = Tokenizer(base).decode([eos], skip_special_tokens=False)
    assert tokens() == [end]
    assert tokens(echo=True)[-3:] == ["x", "y", end]


def test_texts_that_are_not_wanted_do_not_occur(server: ServerUnderTest) -> None:
    caller = server.make_caller("umbra")

    def ask(**changes: object) -> str:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 12, "temperature": 0}
        answer = caller.http.post("/v1/completions", json={**body, **changes})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    usual = ask()
    word = usual[4:6]
    assert word not in ask(bad_words=[word])
    stop = usual[5]
    assert ask(stop=[stop], include_stop_str_in_output=True) == ask(stop=[stop]) + stop


def test_allowed_tokens_are_those_of_the_vocabulary(server: ServerUnderTest, base: Path) -> None:
    caller = server.make_caller("zeta")
    body = {"model": "tiny", "prompt": "x", "max_tokens": 5}
    (token,) = Tokenizer(base).encode("a", add_special_tokens=False)
    answer = caller.http.post("/v1/completions", json={**body, "allowed_token_ids": [token]})
    assert answer.json()["choices"][0]["text"] == "aaaaa"
    answer = caller.http.post("/v1/completions", json={**body, "allowed_token_ids": [10**6]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "allowed_token_ids"
