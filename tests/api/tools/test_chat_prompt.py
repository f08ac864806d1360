"""Prompts of conversations with tools: by the base's template, or in the system message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraplex.api.contract.errors import ApiError
from loraplex.api.schemas.chat import ChatBody
from loraplex.api.tools.chat_prompt import ChatPrompts
from loraplex.api.tools.conversation import ChatMessage, PastCall
from loraplex.api.tools.tool import Tool
from loraplex.api.tools.tool_format import ToolFormatName
from loraplex.engine.text.tokenizer import Tokenizer
from support.chat_templates import (
    DEEPSEEK_V3_TEMPLATE,
    DEEPSEEK_V31_TEMPLATE,
    GLM45_TEMPLATE,
    GRANITE_TEMPLATE,
    HARMONY_TEMPLATE,
    HERMES_TEMPLATE,
    HUNYUAN_TEMPLATE,
    INTERNLM_TEMPLATE,
    JAMBA_TEMPLATE,
    KIMI_K2_TEMPLATE,
    LFM2_TEMPLATE,
    LLAMA4_PYTHONIC_TEMPLATE,
    LLAMA_TEMPLATE,
    MINIMAX_M2_TEMPLATE,
    MISTRAL_ARGS_TEMPLATE,
    MISTRAL_TEMPLATE,
    PHI4_MINI_TEMPLATE,
    PYTHONIC_TEMPLATE,
    QWEN3_CODER_TEMPLATE,
    SEED_OSS_TEMPLATE,
    STEP3_TEMPLATE,
    UNKNOWN_CALLS_TEMPLATE,
    XLAM_TEMPLATE,
)
from support.models import CHAT_TEMPLATE, save_byte_tokenizer

WEATHER = Tool("weather", "Says it.", {"type": "object", "properties": {}}, is_strict=False)
USER = ChatMessage("user", "hi")
CALL = PastCall("abc123xyz", "weather", {"city": "Köln"})
TALK = [
    USER,
    ChatMessage("assistant", "", calls=(CALL,)),
    ChatMessage("tool", "rain", call_id=CALL.id, tool_name="weather"),
]


def tokenizer_with(path: Path, template: str | None) -> Tokenizer:
    save_byte_tokenizer(path)
    template_file = path / "chat_template.jinja"
    template_file.unlink() if template is None else template_file.write_text(template)
    return Tokenizer(path)


def prompt_of(
    tokenizer: Tokenizer,
    messages: list[ChatMessage],
    tools: list[Tool],
    chosen: ToolFormatName | None = None,
) -> str:
    ids = ChatPrompts(tokenizer, chosen).encode(messages, tools)
    return tokenizer.backend.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (HERMES_TEMPLATE, ToolFormatName.HERMES),
        (LLAMA_TEMPLATE, ToolFormatName.LLAMA),
        (MISTRAL_TEMPLATE, ToolFormatName.MISTRAL),
        (MISTRAL_ARGS_TEMPLATE, ToolFormatName.MISTRAL_ARGS),
        (CHAT_TEMPLATE, ToolFormatName.HERMES),
        (DEEPSEEK_V3_TEMPLATE, ToolFormatName.DEEPSEEK_V3),
        (DEEPSEEK_V31_TEMPLATE, ToolFormatName.DEEPSEEK_V31),
        (GLM45_TEMPLATE, ToolFormatName.GLM45),
        (GRANITE_TEMPLATE, ToolFormatName.GRANITE),
        (INTERNLM_TEMPLATE, ToolFormatName.INTERNLM),
        (JAMBA_TEMPLATE, ToolFormatName.JAMBA),
        (MINIMAX_M2_TEMPLATE, ToolFormatName.MINIMAX_M2),
        (PHI4_MINI_TEMPLATE, ToolFormatName.PHI4_MINI),
        (QWEN3_CODER_TEMPLATE, ToolFormatName.QWEN3_CODER),
        (SEED_OSS_TEMPLATE, ToolFormatName.SEED_OSS),
        (HARMONY_TEMPLATE, ToolFormatName.OPENAI),
        (HUNYUAN_TEMPLATE, ToolFormatName.HUNYUAN_A13B),
        (KIMI_K2_TEMPLATE, ToolFormatName.KIMI_K2),
        (LFM2_TEMPLATE, ToolFormatName.LFM2),
        (LLAMA4_PYTHONIC_TEMPLATE, ToolFormatName.LLAMA4_PYTHONIC),
        (PYTHONIC_TEMPLATE, ToolFormatName.PYTHONIC),
        (STEP3_TEMPLATE, ToolFormatName.STEP3),
        (XLAM_TEMPLATE, ToolFormatName.XLAM),
    ],
)
def test_the_template_shows_how_the_base_writes_calls(
    tmp_path: Path, template: str, name: ToolFormatName
) -> None:
    assert ChatPrompts(tokenizer_with(tmp_path, template)).tool_format.name is name


@pytest.mark.parametrize(
    "template",
    [
        UNKNOWN_CALLS_TEMPLATE,
        XLAM_TEMPLATE.replace("[{", "<TOOLCALL>[{"),
        PYTHONIC_TEMPLATE.replace("[{{", "<calls>[{{"),
    ],
    ids=["arrow", "objects after a marker", "expressions after a marker"],
)
def test_an_unknown_form_of_calls_is_refused_by_name_until_the_operator_names_one(
    tmp_path: Path, template: str
) -> None:
    tokenizer = tokenizer_with(tmp_path, template)
    with pytest.raises(ApiError, match="--tool-format") as refused:
        _ = ChatPrompts(tokenizer).tool_format
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "tools")
    chosen = ChatPrompts(tokenizer, ToolFormatName.LLAMA)
    assert chosen.tool_format.name is ToolFormatName.LLAMA


def test_a_template_that_knows_tools_is_given_them_as_they_are(tmp_path: Path) -> None:
    prompt = prompt_of(tokenizer_with(tmp_path, HERMES_TEMPLATE), TALK, [WEATHER])
    start, _, rest = prompt.partition("</tools>")
    assert json.loads(start.partition("<tools>\n")[2]) == WEATHER.for_template()
    assert rest == (
        "<|end|><|user|>hi<|end|><|assistant|><tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|end|>'
        "<|user|><tool_response>\nrain\n</tool_response><|end|><|assistant|>"
    )


@pytest.mark.parametrize("system", [[], [ChatMessage("system", "Be brief.")]])
def test_a_template_that_knows_none_has_them_described_in_the_system_message(
    tmp_path: Path, system: list[ChatMessage]
) -> None:
    prompt = prompt_of(tokenizer_with(tmp_path, CHAT_TEMPLATE), [*system, *TALK], [WEATHER])
    start, _, rest = prompt.partition("<|end|>")
    assert start.startswith("<|system|>" + ("Be brief.\n\n# Tools" if system else "# Tools"))
    described = start.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert json.loads(described) == WEATHER.for_template()
    assert rest == (
        "<|user|>hi<|end|><|assistant|><tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|end|>'
        "<|user|><tool_response>\nrain\n</tool_response><|end|><|assistant|>"
    )


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, HERMES_TEMPLATE])
def test_without_tools_the_prompt_is_what_it_always_was(tmp_path: Path, template: str) -> None:
    tokenizer = tokenizer_with(tmp_path, template)
    messages = [ChatMessage("system", "Be brief."), USER]
    plain = [{"role": message.role, "content": message.text} for message in messages]
    assert ChatPrompts(tokenizer).encode(messages, []) == tokenizer.encode_chat(plain)


def test_what_the_template_refuses_is_the_callers_error(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, LLAMA_TEMPLATE)
    twice = [USER, ChatMessage("assistant", "", calls=(CALL, CALL))]
    with pytest.raises(Exception, match="single tool-calls"):
        ChatPrompts(tokenizer).encode(twice, [WEATHER])


def test_a_base_without_template_is_no_worse_than_before(tmp_path: Path) -> None:
    prompts = ChatPrompts(tokenizer_with(tmp_path, None))
    with pytest.raises(Exception, match="chat template"):
        prompts.encode([USER], [WEATHER])


def test_the_template_is_given_what_the_assistant_thought(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}({{ m.reasoning_content }}|"
        "{{ m.reasoning }}){% endfor %}"
    )
    tokenizer = tokenizer_with(tmp_path, template)
    body = ChatBody.model_validate(
        {
            "model": "bot",
            "messages": [
                {"role": "user", "content": "2+2", "cache_control": {"type": "ephemeral"}},
                {"role": "assistant", "content": "4", "reasoning_content": "easy"},
            ],
        }
    )
    messages = [message.for_template() for message in body.conversation()]
    assert tokenizer.render_chat(messages, tools=[]) == "user:2+2(|)assistant:4(easy|easy)"


def test_a_template_that_appends_arguments_gets_them_as_text(tmp_path: Path) -> None:
    prompt = prompt_of(tokenizer_with(tmp_path, DEEPSEEK_V31_TEMPLATE), TALK, [WEATHER])
    assert 'weather<｜tool▁sep｜>{"city": "Köln"}<｜tool▁call▁end｜>' in prompt


def test_a_template_that_writes_numbered_ids_gets_no_others(tmp_path: Path) -> None:
    """The name of the function is in the id alone."""
    own = PastCall("functions.weather:0", "weather", {"city": "Oslo"})
    talk = [
        USER,
        ChatMessage("assistant", "", calls=(own, CALL)),
        ChatMessage("tool", "sun", call_id=own.id, tool_name="weather"),
        ChatMessage("tool", "rain", call_id=CALL.id, tool_name="weather"),
    ]
    prompt = prompt_of(tokenizer_with(tmp_path, KIMI_K2_TEMPLATE), talk, [WEATHER])
    calls, _, results = prompt.partition("<|tool_calls_section_end|>")
    for number in (0, 1):
        marked = f"<|tool_call_begin|>functions.weather:{number}<|tool_call_argument_begin|>"
        assert calls.count(marked) == 1
    assert results == (
        "## Return of functions.weather:0\nsun## Return of functions.weather:1\nrain"
    )


@pytest.mark.parametrize(
    ("text", "reasoning", "analysis"),
    [("", "I look.", "I look."), ("One moment.", None, "One moment."), ("One.", "Hm.", "Hm.")],
)
def test_the_template_of_gpt_oss_gets_one_text_before_a_call(
    tmp_path: Path, text: str, reasoning: str | None, analysis: str
) -> None:
    talk = [USER, ChatMessage("assistant", text, calls=(CALL,), reasoning=reasoning)]
    prompt = prompt_of(tokenizer_with(tmp_path, HARMONY_TEMPLATE), talk, [WEATHER])
    assert prompt.endswith(
        f"<|start|>assistant<|channel|>analysis<|message|>{analysis}<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "Köln"}<|call|><|start|>assistant'
    )
