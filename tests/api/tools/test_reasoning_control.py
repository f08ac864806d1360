"""What a chat template shows about reasoning: its format, its switch and its effort."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraplex.api.contract.errors import ApiError
from loraplex.api.tools.conversation import ChatMessage
from loraplex.api.tools.reasoning_control import ReasoningControl
from loraplex.api.tools.reasoning_format import (
    GEMMA4_THINK,
    GRANITE_THINK,
    HARMONY,
    MISTRAL_THINK,
    REASONING_FORMATS,
    THINK,
    Beginning,
    ReasoningFormat,
    ReasoningParser,
)
from loraplex.engine.text.chat_form import ChatForm
from loraplex.engine.text.tokenizer import Tokenizer
from support.chat_templates import HARMONY_TEMPLATE, THINKING_TEMPLATE
from support.models import CHAT_TEMPLATE, save_byte_tokenizer

USER = ChatMessage("user", "hi")
EFFORT_TEMPLATE = CHAT_TEMPLATE + "{{ '<think>' }}Effort: {{ reasoning_effort }}{{ '</think>' }}"
ALWAYS_TEMPLATE = CHAT_TEMPLATE + "<think>{# until </think> #}"


def tokenizer_with(path: Path, template: str) -> Tokenizer:
    save_byte_tokenizer(path)
    (path / "chat_template.jinja").write_text(template)
    return Tokenizer(path)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT_TEMPLATE, None),
        (THINKING_TEMPLATE, THINK),
        (ALWAYS_TEMPLATE, THINK),
        (CHAT_TEMPLATE + "{# <think> alone #}", None),
        (CHAT_TEMPLATE + "{# <think></think> and [THINK][/THINK] #}", None),
        (CHAT_TEMPLATE + "{# [THINK] [/THINK] #}", MISTRAL_THINK),
        (CHAT_TEMPLATE + "{# <|channel>thought <channel|> #}", GEMMA4_THINK),
        (HARMONY_TEMPLATE, HARMONY),
        (CHAT_TEMPLATE + "{# Here is my thought process: Here is my response: #}", GRANITE_THINK),
    ],
)
def test_a_template_shows_the_format_if_it_is_unmistakable(
    tmp_path: Path, template: str, expected: ReasoningFormat | None
) -> None:
    assert ReasoningControl(tokenizer_with(tmp_path, template)).format is expected


def test_the_operators_choice_comes_first(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, THINKING_TEMPLATE)
    assert ReasoningControl(tokenizer, ReasoningParser.NONE).format is None
    assert ReasoningControl(tokenizer, ReasoningParser.MISTRAL).format is MISTRAL_THINK
    assert set(REASONING_FORMATS) == set(ReasoningParser) - {ReasoningParser.NONE}


@pytest.mark.parametrize(
    ("template", "effort", "variables"),
    [
        (CHAT_TEMPLATE, None, {}),
        (CHAT_TEMPLATE, "none", {}),
        (CHAT_TEMPLATE, "high", None),
        (CHAT_TEMPLATE + "{# enable_thinking #}", "high", None),
        (THINKING_TEMPLATE, None, {}),
        (THINKING_TEMPLATE, "none", {"enable_thinking": False}),
        (THINKING_TEMPLATE, "low", {"enable_thinking": True}),
        (THINKING_TEMPLATE.replace("enable_", ""), "none", {"thinking": False}),
        (EFFORT_TEMPLATE, "high", {"reasoning_effort": "high"}),
        (HARMONY_TEMPLATE, "low", {"reasoning_effort": "low"}),
        (EFFORT_TEMPLATE, "none", {"reasoning_effort": "none"}),
        (ALWAYS_TEMPLATE, "none", None),
        (ALWAYS_TEMPLATE, "high", None),
    ],
)
def test_an_effort_is_told_to_templates_that_follow_it_and_refused_otherwise(
    tmp_path: Path, template: str, effort: str | None, variables: dict[str, Any] | None
) -> None:
    control = ReasoningControl(tokenizer_with(tmp_path, template))
    if variables is None:
        with pytest.raises(ApiError) as refused:
            control.form_with_effort(ChatForm(), effort, param="reasoning_effort")
        assert refused.value.code == "unsupported_parameter"
        assert refused.value.param == "reasoning_effort"
    else:
        form = control.form_with_effort(ChatForm(), effort, param="reasoning_effort")
        assert form.variables == variables


def test_the_variables_of_the_request_have_precedence(tmp_path: Path) -> None:
    control = ReasoningControl(tokenizer_with(tmp_path, THINKING_TEMPLATE))
    asked = ChatForm(variables={"enable_thinking": True})
    assert control.form_with_effort(asked, "none", param="reasoning_effort") == asked


@pytest.mark.parametrize(
    ("form", "last", "beginning"),
    [
        (ChatForm(), USER, Beginning.REASONING),
        (ChatForm(variables={"enable_thinking": False}), USER, Beginning.ANSWER),
        (ChatForm(adds_generation_prompt=False), USER, Beginning.EITHER),
        (
            ChatForm(adds_generation_prompt=False, continues_final_message=True),
            ChatMessage("assistant", "<think>So"),
            Beginning.REASONING,
        ),
        (
            ChatForm(adds_generation_prompt=False, continues_final_message=True),
            ChatMessage("assistant", "So"),
            Beginning.ANSWER,
        ),
    ],
)
def test_the_prompt_shows_what_its_outputs_begin_with(
    tmp_path: Path, form: ChatForm, last: ChatMessage, beginning: Beginning
) -> None:
    tokenizer = tokenizer_with(tmp_path, THINKING_TEMPLATE)
    messages = [last] if last is USER else [USER, last]
    prompt = tokenizer.encode_chat([message.for_template() for message in messages], form=form)
    reasoning = ReasoningControl(tokenizer).of_prompt(prompt, messages, form)
    assert reasoning is not None
    assert reasoning.beginning is beginning


def test_a_base_that_does_not_reason_has_no_reasoning(tmp_path: Path) -> None:
    control = ReasoningControl(tokenizer_with(tmp_path, CHAT_TEMPLATE))
    assert control.of_prompt([1], [USER], ChatForm()) is None
