"""An adapter with tokens of its own, from the push to the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError
from tokenizers import AddedToken

from loraplex.api.client.api_client import ApiClient
from loraplex.api.client.errors import ClientError
from loraplex.api.client.local_adapter import read_adapter
from loraplex.api.client.progress import Progress
from loraplex.api.client.uploads import push_adapter
from support.resized_adapters import RECIPES, save_resized, save_tokenizer
from support.server import Caller, ServerUnderTest

WORD = AddedToken("<word>", normalized=False)
"""Part of the text."""
END = AddedToken("<stop>", special=True, normalized=False)
ENDLESS: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("added")
    save_resized(tiny_base, path, RECIPES["rows of the resized matrices"], seed=1)
    save_tokenizer(tiny_base, path, [WORD, END], end="<stop>")
    return path


@pytest.fixture(scope="module")
def speaker(server: ServerUnderTest, folder: Path, adapters: list[Path]) -> Caller:
    """A tenant with the adapter `speaker`, and the plain one `bot`."""
    caller = server.make_caller("speakers")
    caller.push(folder, "speaker")
    caller.push(adapters[0], "bot")
    return caller


@pytest.fixture(scope="module")
def word(speaker: Caller) -> int:
    """Its first own token."""
    (token,) = tokens_of(speaker, "speaker", "<word>")
    return token


def tokens_of(caller: Caller, model: str, text: str) -> list[int]:
    found: list[int] = caller.http.post("/tokenize", json={"model": model, "prompt": text}).json()[
        "tokens"
    ]
    return found


def test_the_version_names_its_tokens(speaker: Caller) -> None:
    report = speaker.http.get("/v1/adapters/speaker").json()["versions"][0]["report"]
    base = speaker.http.get("/v1/base").json()["num_tokens"]
    assert report["vocab_size"] == base + 3
    assert [(token["id"], token["content"]) for token in report["added_tokens"]] == [
        (base, "<word>"),
        (base + 1, "<stop>"),
    ]
    assert [token["ends_output"] for token in report["added_tokens"]] == [False, True]
    assert "added_tokens" in report["features"]


def test_only_the_adapters_own_prompts_have_its_tokens(speaker: Caller, word: int) -> None:
    assert tokens_of(speaker, "speaker", "a<word>b")[1] == word
    for other in ("bot", "tiny"):
        assert len(tokens_of(speaker, other, "a<word>b")) == len("a<word>b")
    body = {"model": "speaker", "tokens": [word, word + 1]}
    assert speaker.http.post("/detokenize", json=body).json()["prompt"] == "<word><stop>"
    assert speaker.http.post("/detokenize", json={**body, "model": "bot"}).status_code == 400


def test_answers_have_its_words_and_are_metered_by_its_tokens(speaker: Caller, word: int) -> None:
    answer = speaker.openai.completions.create(
        model="speaker",
        prompt="a<word>b",
        max_tokens=4,
        logprobs=1,
        logit_bias={str(word): 100},
        temperature=0,
        extra_body=ENDLESS,
    )
    assert answer.choices[0].text == "<word>" * 4
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["<word>"] * 4
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)


def test_its_end_token_ends_its_answers(speaker: Caller, word: int) -> None:
    chat = speaker.openai.chat.completions.create(
        model="speaker",
        messages=[{"role": "user", "content": "hi <word>"}],
        max_tokens=9,
        logit_bias={str(word + 1): 100},
    )
    assert chat.choices[0].finish_reason == "stop"
    assert chat.choices[0].message.content == ""


@pytest.mark.parametrize("model", ["bot", "tiny"])
def test_other_models_do_not_take_its_tokens(speaker: Caller, word: int, model: str) -> None:
    with pytest.raises(BadRequestError, match="token ids outside"):
        speaker.openai.completions.create(model=model, prompt=[word], max_tokens=1)
    with pytest.raises(BadRequestError, match="token ids outside"):
        speaker.openai.completions.create(model=model, prompt="a", logit_bias={str(word): 1})


def test_downloaded_files_are_the_same_adapter(speaker: Caller, tmp_path: Path) -> None:
    version = speaker.http.get("/v1/adapters/speaker").json()["versions"][0]
    path = f"/v1/adapters/speaker/versions/{version['version']}/files"
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(speaker.http.get(f"{path}/{name}").content)
    assert read_adapter(tmp_path).folder.tokens == []
    assert speaker.push(tmp_path, "copy")["digest"] == version["digest"]


def test_a_key_that_may_not_read_pushes_without_the_texts(
    speaker: Caller, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"name": "writer", "scopes": ["adapters:write"]}
    created = speaker.http.post("/v1/keys", json=body).json()
    with httpx.Client(
        base_url=speaker.url, headers={"authorization": f"Bearer {created['key']}"}, timeout=60.0
    ) as http:
        version = push_adapter(
            ApiClient(http, speaker.url),
            read_adapter(folder),
            "written",
            aliases=[],
            base_id=None,
            progress=Progress(),
        )
    assert version["report"]["vocab_size"] is not None
    assert version["report"]["added_tokens"] == []
    assert "adapters:read" in caplog.text


def test_tokens_that_do_not_follow_the_bases_are_refused(
    speaker: Caller, tiny_base: Path, tmp_path: Path
) -> None:
    save_resized(tiny_base, tmp_path, RECIPES["rows of the resized matrices"], seed=2)
    save_tokenizer(tiny_base, tmp_path, [WORD, END])
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace('"<word>"', '"<|user|>"'))
    with pytest.raises(ClientError, match="resized_vocabulary"):
        speaker.push(tmp_path, "wrong")
