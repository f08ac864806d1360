"""Which tokens of an example are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from loraplex.engine.text.chat_form import ChatForm
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.engine.tuning.errors import InvalidTrainingData
from loraplex.engine.tuning.examples import Examples
from loraplex.engine.tuning.lines import Completion, read_example
from loraplex.engine.tuning.tokens import TrainedTokens, tokenize
from support.chat_templates import HERMES_TEMPLATE
from support.models import save_byte_tokenizer
from support.tuning import chat_line, write_lines

USER = {"role": "user", "content": "Hi"}
TURNS = [
    USER,
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]


def tokenizer_of(folder: Path, template: str | None = None) -> Tokenizer:
    """One token per byte."""
    save_byte_tokenizer(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


def tokenized(tokenizer: Tokenizer, *messages: dict[str, Any], **line: Any) -> TrainedTokens:
    return tokenize(read_example(json.dumps({"messages": messages, **line}).encode()), tokenizer)


def pieces(tokenizer: Tokenizer, tokens: TrainedTokens) -> list[tuple[bool, str]]:
    """Adjacent tokens that are trained, or are not, as one text."""
    found: list[tuple[bool, str]] = []
    for token, is_trained in zip(*tokens, strict=True):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if found and found[-1][0] == is_trained:
            text = found.pop()[1] + text
        found.append((is_trained, text))
    return found


def test_answers_and_the_tokens_that_end_them_are_trained(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    assert pieces(tokenizer, tokenized(tokenizer, *TURNS)) == [
        (False, "<|user|>Hi<|end|><|assistant|>"),
        (True, "Hello<|end|>"),
        (False, "<|user|>Bye<|end|><|assistant|>"),
        (True, "See you<|end|>"),
    ]


def test_a_message_of_weight_0_is_part_of_the_prompt(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    tokens = tokenized(tokenizer, USER, {**TURNS[1], "weight": 0}, *TURNS[2:])
    assert pieces(tokenizer, tokens) == [
        (False, "<|user|>Hi<|end|><|assistant|>Hello<|end|><|user|>Bye<|end|><|assistant|>"),
        (True, "See you<|end|>"),
    ]


def test_the_prompt_is_that_of_a_request(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, HERMES_TEMPLATE)
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    call = {"id": "c", "function": {"name": "find", "arguments": "{}"}}
    tokens = tokenized(tokenizer, USER, {"role": "assistant", "tool_calls": [call]}, tools=tools)
    prompt = tokenizer.encode_chat([USER], tools=tools, form=ChatForm())
    assert tokens.token_ids[: len(prompt)] == prompt
    assert tokens.is_trained.index(True) == len(prompt)
    ((_, _), (_, answer)) = pieces(tokenizer, tokens)
    assert answer == '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call><|end|>'


def test_what_a_template_writes_after_the_end_is_not_trained(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = tokenizer_of(tmp_path, template)
    assert pieces(tokenizer, tokenized(tokenizer, *TURNS))[1:3] == [
        (True, "Hello<|end|>"),
        (False, "\n<|user|>Bye<|end|>\n<|assistant|>"),
    ]


def test_an_answer_that_the_template_does_not_end_is_ended(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = tokenizer_of(tmp_path, template)
    assert pieces(tokenizer, tokenized(tokenizer, *TURNS[:2])) == [
        (False, "user: Hi\nassistant: "),
        (True, "Hello\n<|end|>"),
    ]


def test_a_template_that_changes_earlier_messages_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content if loop.last else 'old' }}<|end|>{% endfor %}"
    tokenizer = tokenizer_of(tmp_path, template)
    with pytest.raises(InvalidTrainingData, match="changes earlier messages"):
        tokenized(tokenizer, *TURNS)


def test_an_example_that_the_template_refuses_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "{{ raise_exception('no such role') }}")
    with pytest.raises(InvalidTrainingData, match="no such role"):
        tokenized(tokenizer, *TURNS)


def test_a_conversation_cannot_begin_with_an_answer(tmp_path: Path) -> None:
    with pytest.raises(InvalidTrainingData, match="first message"):
        tokenized(tokenizer_of(tmp_path), TURNS[1], USER)


def test_a_completion_begins_where_its_prompt_as_sent_ends(tmp_path: Path) -> None:
    """A tokenizer joins the border's characters; a request's prompt is never joined to more."""
    vocab = {"a": 0, "b": 1, "ab": 2, "<end>": 3}
    backend = Backend(models.BPE(vocab=vocab, merges=[("a", "b")]))
    backend.add_special_tokens(["<end>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("ab") == [2]
    joined = tokenize(Completion("a", "b"), tokenizer)
    assert joined == TrainedTokens([0, 1, 3], [False, True, True])
    apart = tokenize(Completion("b", "ab"), tokenizer)
    assert apart == TrainedTokens([1, 2, 3], [False, True, True])


def test_a_long_example_keeps_its_end(tmp_path: Path) -> None:
    tokens = TrainedTokens([1, 2, 3, 4], [False, True, True, True])
    assert tokens.cut(3) == TrainedTokens([2, 3, 4], [False, True, True])
    assert tokens.cut(9) == tokens


def test_a_file_says_which_line_is_wrong(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    path = write_lines(tmp_path / "data", [chat_line("a", "b")] * 2)
    path.write_bytes(path.read_bytes() + b"\n" + b'{"prompt": 1}\n')
    with pytest.raises(InvalidTrainingData, match="prompt") as caught:
        Examples(path, tokenizer, method="supervised", max_tokens=64)
    assert caught.value.line == 4


def test_examples_are_read_in_any_order(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    path = write_lines(tmp_path / "data", [chat_line("a" * i, "b") for i in range(1, 6)])
    path.write_text("\n" + path.read_text().rstrip("\n"))
    examples = Examples(path, tokenizer, method="supervised", max_tokens=64)
    assert list(examples.lengths) == [i + 5 for i in range(1, 6)]
    for index in (4, 0, 2):
        (tokens,) = examples[index]
        assert len(tokens.token_ids) == examples.lengths[index]


def test_a_file_without_examples_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data", [])
    with pytest.raises(InvalidTrainingData, match="no examples"):
        Examples(path, tokenizer_of(tmp_path), method="supervised", max_tokens=64)


def test_an_example_that_loses_its_answer_to_the_cut_is_refused(tmp_path: Path) -> None:
    line: dict[str, Any] = {"messages": [*TURNS[:2], {"role": "user", "content": "x" * 99}]}
    path = write_lines(tmp_path / "data", [line])
    examples = Examples(path, tokenizer_of(tmp_path), method="supervised", max_tokens=64)
    assert examples.lengths[0] == 11, "what follows the last trained message is left out"
    line["messages"] = [*TURNS[:2], *TURNS[2:3], {**TURNS[3], "weight": 0}]
    write_lines(path, [line])
    with pytest.raises(InvalidTrainingData, match="no token of the last 1 "):
        Examples(path, tokenizer_of(tmp_path), method="supervised", max_tokens=1)
