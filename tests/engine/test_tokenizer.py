from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from loraplex.engine.errors import (
    ChatTemplateMissing,
    InvalidParameter,
    PromptTooLong,
    UnsupportedModel,
)
from loraplex.engine.text.chat_form import ChatForm
from loraplex.engine.text.tokenizer import Tokenizer
from support.models import save_byte_tokenizer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


def test_encodes_and_decodes_like_the_library(tokenizer: Tokenizer, model_dir: Path) -> None:
    library = PreTrainedTokenizerFast.from_pretrained(model_dir)
    text = "Grüße, 你好 🦙\n"
    assert tokenizer.encode(text) == library(text)["input_ids"]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_pair_has_the_special_tokens_of_the_library_and_loses_its_end(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    backend = PreTrainedTokenizerFast.from_pretrained(tmp_path).backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single="<|user|> $A",
        pair="<|user|> $A <|end|> $B <|end|>",
        special_tokens=[(text, backend.token_to_id(text)) for text in ("<|user|>", "<|end|>")],
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    library = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode_pair("ab", "cde") == library("ab", "cde")["input_ids"]
    bare = library("ab", "cde", add_special_tokens=False)["input_ids"]
    assert tokenizer.encode_pair("ab", "cde", add_special_tokens=False) == bare
    assert tokenizer.encode_pair("ab", "cde", truncate=6) == library("ab", "c")["input_ids"]
    begin, a, b, middle, _, end = library("ab", "c")["input_ids"]
    assert tokenizer.encode_pair("ab", "cde", truncate=5) == [begin, a, b, middle, end]
    assert tokenizer.encode_pair("ab", "cde", truncate=99) == library("ab", "cde")["input_ids"]
    with pytest.raises(InvalidParameter, match="too few"):
        tokenizer.encode_pair("ab", "cde", truncate=4)
    with pytest.raises(PromptTooLong):
        tokenizer.encode_pair("ab" * 900, "cde" * 900, max_tokens=100)


def test_renders_a_chat_with_the_base_models_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    text = "<|system|>be brief<|end|><|user|>hi<|end|>"
    assert tokenizer.render_chat(messages) == text + "<|assistant|>"
    assert tokenizer.render_chat(messages, form=ChatForm(adds_generation_prompt=False)) == text
    ids = tokenizer.encode_chat(messages)
    assert [tokenizer.token_text(i) for i in (ids[0], ids[-1])] == ["<|system|>", "<|assistant|>"]
    assert len(ids) == len("be brief") + len("hi") + 5  # five special tokens


def test_a_final_message_that_is_continued_is_not_ended(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Dear"}]
    form = ChatForm(adds_generation_prompt=False, continues_final_message=True)
    text = tokenizer.render_chat(messages, form=form)
    assert text == "<|user|>hi<|end|><|assistant|>Dear"


def test_a_template_gets_the_variables_that_it_reads_and_no_others(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    template = "{{ messages[0].content }}{% if thinks is defined and not thinks %}!{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "hi"
    assert tokenizer.render_chat(messages, form=ChatForm(variables={"thinks": False})) == "hi!"
    for name in ("think", "messages", "tokenize", "chat_template", "add_generation_prompt"):
        with pytest.raises(InvalidParameter, match="chat_template_kwargs"):
            tokenizer.render_chat(messages, form=ChatForm(variables={name: True}))


def test_a_base_without_chat_template_is_a_coded_error(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateMissing):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "messages", [[], [{"role": "tool", "content": "x"}], [{"role": "user", "content": {"a": 1}}]]
)
def test_messages_that_the_template_refuses_are_the_callers_error(
    tmp_path: Path, messages: list[dict[str, object]]
) -> None:
    save_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}"
        "{% if m.role != 'user' %}{{ raise_exception('only user') }}{% endif %}"
        "{{ 'U: ' + m.content }}{% endfor %}"
    )
    with pytest.raises(InvalidParameter, match="messages") as error:
        Tokenizer(tmp_path).encode_chat(messages)
    assert error.value.param == "messages"


def test_end_of_sequence_tokens_come_from_every_declaration(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert Tokenizer(tmp_path).eos_token_ids == {256, 7, 8, 9}


def test_a_saved_truncation_cuts_no_prompt(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    saved = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    saved.backend_tokenizer.enable_truncation(4)
    saved.backend_tokenizer.enable_padding(length=64)
    saved.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer(tmp_path).encode("x" * 10)) == 10


def test_bytes_of_the_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    text = "a ä€🦙\x00\n"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.token_text(ids[0]) == "a"
    assert tokenizer.token_text(ids[2]) == "\ufffd"  # half of "ä"


def test_unknown_tokens_have_no_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 260
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


@pytest.mark.parametrize("content", [None, "{", '{"model": {"type": "None"}}'])
def test_a_missing_or_broken_tokenizer_is_an_unsupported_model(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UnsupportedModel):
        Tokenizer(tmp_path)


def test_a_missing_directory_is_an_unsupported_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"has no tokenizer\.json"):
        Tokenizer(tmp_path / "missing")


def test_tokenizing_imports_no_torch(model_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from loraplex.engine.text.tokenizer import Tokenizer\n"
        f"Tokenizer(Path({str(model_dir)!r})).encode_chat([dict(role='user', content='x')])\n"
        "sys.exit('torch' in sys.modules)"
    )
    root = str(Path(sys.modules["loraplex"].__path__[0]).parent)
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": root}, timeout=60)
