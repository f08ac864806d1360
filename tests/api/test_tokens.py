"""`/tokenize` and `/detokenize`, as vLLM's clients call them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.engine.text.chat_form import ChatForm
from loraplex.engine.text.tokenizer import Tokenizer
from support.envelopes import check_envelope
from support.server import Caller

TEXT = "Grüße 👋, <|end|>"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_base: Path) -> Tokenizer:
    return Tokenizer(tiny_base)


def test_text_becomes_tokens_and_tokens_become_the_same_text(
    resident: Caller, tokenizer: Tokenizer
) -> None:
    body = {"model": "bot", "prompt": TEXT, "return_token_strs": True}
    answer = resident.http.post("/tokenize", json=body)
    found = answer.json()
    assert answer.headers["cache-control"] == "no-store"
    assert found["tokens"] == tokenizer.encode(TEXT)
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 512
    assert found["token_strs"][:2] == ["G", "r"]
    assert found["token_strs"][-1] == "<|end|>"
    back = resident.http.post("/detokenize", json={"tokens": found["tokens"]})
    assert back.json()["prompt"] == TEXT


@pytest.mark.parametrize("ends", [True, False])
def test_messages_become_the_prompt_that_a_chat_has(
    resident: Caller, tokenizer: Tokenizer, ends: bool
) -> None:
    body = {"messages": MESSAGES, "add_generation_prompt": ends}
    found = resident.http.post("/tokenize", json=body).json()
    assert found["tokens"] == tokenizer.encode_chat(
        MESSAGES, form=ChatForm(adds_generation_prompt=ends)
    )
    assert found["token_strs"] is None
    if ends:
        chat = resident.openai.chat.completions.create(
            model="bot",
            messages=MESSAGES,  # type: ignore[arg-type]
            max_tokens=1,
        )
        assert chat.usage is not None
        assert found["count"] == chat.usage.prompt_tokens


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/tokenize", {}, "invalid_parameter", "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "invalid_parameter", "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other/bot"}, "model_not_found", None),
        (
            "/tokenize",
            {"prompt": "a", "chat_template": "x"},
            "unsupported_parameter",
            "chat_template",
        ),
        ("/detokenize", {"tokens": [1 << 30]}, "invalid_parameter", "tokens"),
        ("/detokenize", {"tokens": [-1]}, "invalid_parameter", "tokens.0"),
        ("/detokenize", {"tokens": "abc"}, "invalid_parameter", "tokens"),
        ("/detokenize", {"tokens": [], "model": "none"}, "model_not_found", None),
    ],
)
def test_what_is_no_request_is_refused_by_name(
    resident: Caller, path: str, body: dict[str, Any], code: str, param: str | None
) -> None:
    check_envelope(resident.http.post(path, json=body), code, param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_nobody_tokenizes_without_a_key(resident: Caller, path: str) -> None:
    check_envelope(httpx.post(resident.url + path, json={"prompt": "x"}), "missing_api_key")


def test_a_body_beyond_the_limit_is_refused(resident: Caller) -> None:
    answer = resident.http.post("/tokenize", json={"prompt": "x" * (5 << 20)})
    check_envelope(answer, "body_too_large")


def test_who_looks_below_v1_is_told_where_it_is(resident: Caller) -> None:
    error = check_envelope(resident.http.post("/v1/tokenize", json={"prompt": "x"}), "not_found")
    assert "/tokenize" in error["message"]
