"""Renders conversations as prompts with the base's chat template, including tools."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from ...engine.errors import InvalidParameter
from ...engine.text.chat_form import ChatForm
from ...engine.text.tokenizer import Tokenizer
from ..contract.errors import ApiError
from .call_spelling import NumberedSpelling
from .conversation import ChatMessage, PastCall
from .numbered_ids import with_numbered_ids
from .rendering import rendered
from .tool import Tool
from .tool_format import HERMES, OPENAI, TOOL_FORMATS, ToolFormat, ToolFormatName

_PROBE = "lpx_probe"
_PROBE_TOOL = Tool(_PROBE, "A probe.", {"type": "object", "properties": {}}, is_strict=False)
_PROBE_CALL = PastCall("probe0000", _PROBE, {"x": 1})
_OBJECT = r'\{"name": ?"lpx_probe", ?'
_WRITTEN = (
    (ToolFormatName.HERMES, rf'<tool_call>\s*{_OBJECT}"arguments": ?\{{'),
    (ToolFormatName.MISTRAL, rf'\[TOOL_CALLS\]\s*\[{_OBJECT}"arguments": ?\{{'),
    (ToolFormatName.MISTRAL_ARGS, r"\[TOOL_CALLS\]\s*lpx_probe(\[CALL_ID\]\w*)?\[ARGS\]\s*\{"),
    (ToolFormatName.GRANITE, rf'<\|tool_call\|>\s*\[{_OBJECT}"arguments": ?\{{'),
    (ToolFormatName.HUNYUAN_A13B, rf'<tool_calls>\[{_OBJECT}"arguments": ?\{{'),
    (ToolFormatName.JAMBA, rf'<tool_calls>\s*\[\s*{_OBJECT}"arguments": ?\{{'),
    (ToolFormatName.PHI4_MINI, rf'functools\s*\[{_OBJECT}"arguments": ?\{{'),
    (
        ToolFormatName.INTERNLM,
        rf'<\|action_start\|>\s*<\|plugin\|>\s*{_OBJECT}"parameters": ?\{{',
    ),
    (ToolFormatName.LLAMA, rf'{_OBJECT}"parameters": ?\{{'),
    (
        ToolFormatName.DEEPSEEK_V3,
        r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>lpx_probe\n```json\n\{",
    ),
    (ToolFormatName.DEEPSEEK_V31, r"<｜tool▁call▁begin｜>lpx_probe<｜tool▁sep｜>\{"),
    (ToolFormatName.QWEN3_CODER, r"<tool_call>\s*<function=lpx_probe>\s*<parameter=x>"),
    (ToolFormatName.SEED_OSS, r"<seed:tool_call>\s*<function=lpx_probe>\s*<parameter=x>"),
    (
        ToolFormatName.MINIMAX_M2,
        r'<minimax:tool_call>\s*<invoke name="lpx_probe">\s*<parameter name="x">',
    ),
    (ToolFormatName.GLM45, r"<tool_call>\s*lpx_probe\s*<arg_key>x</arg_key>\s*<arg_value>"),
    (ToolFormatName.KIMI_K2, r"<\|tool_call_begin\|>[^<]*<\|tool_call_argument_begin\|>\s*\{"),
    (
        ToolFormatName.STEP3,
        r'<steptml:invoke name="lpx_probe">\s*<steptml:parameter name="x">',
    ),
    (ToolFormatName.OPENAI, r"to=functions\.lpx_probe ?<\|channel\|>commentary"),
    (ToolFormatName.LFM2, r"<\|tool_call_start\|>\s*\[lpx_probe\(x="),
    (ToolFormatName.LLAMA4_PYTHONIC, r"(?s)<\|header_start\|>.*\n\[lpx_probe\(x="),
    (ToolFormatName.PYTHONIC, r"\n\[lpx_probe\(x="),
    (ToolFormatName.XLAM, rf'\n\[\s*{_OBJECT}"arguments": ?\{{'),
)
"""The text that a template writes for the probe's call, which identifies the format. Where there is
no marker the call begins a line: after anything else it is of an unknown format."""


class ChatPrompts:
    """Renders conversations for one base.

    Tools are passed to a template that supports them. For other templates, the system message
    describes the tools, earlier calls are part of the assistant's text, and results are user
    messages.
    """

    def __init__(self, tokenizer: Tokenizer, chosen: ToolFormatName | None = None) -> None:
        """`chosen` is how the base writes calls; None: as its template does."""
        self._tokenizer = tokenizer
        self._knows_tools = _knows_tools(tokenizer)
        self._takes_arguments_as_text = _takes_arguments_as_text(tokenizer)
        self._format = self._find_format(chosen)

    @property
    def tool_format(self) -> ToolFormat:
        """The base's call format. Raises ApiError if it is unknown."""
        if self._format is None:
            raise ApiError(
                "unsupported_parameter",
                "tools: the base's chat template writes calls in a form that is not known here; "
                "the server's operator can name one with --tool-format",
                param="tools",
            )
        return self._format

    def encode(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        *,
        tokenizer: Tokenizer | None = None,
        form: ChatForm = ChatForm(),
        max_tokens: int | None = None,
    ) -> list[int]:
        """The prompt's token ids. Raises ApiError or an EngineError if it does not fit, and
        PromptTooLong before tokenizing if `max_tokens` makes this certain. `tokenizer`: that of an
        adapter with tokens of its own; the chat template is the base's."""
        if form.continues_final_message and messages[-1].role != "assistant":
            message = "requires a last message of the assistant"
            raise InvalidParameter("continue_final_message", message)
        if not self._knows_tools:
            messages = self._described(messages, tools)
        elif self._format is not None and isinstance(self._format.spelling, NumberedSpelling):
            messages = with_numbered_ids(messages, self._format.spelling)
        elif self._format is OPENAI:
            messages = [_with_one_text(message) for message in messages]
        elif self._takes_arguments_as_text:
            messages = [self._with_written_calls(message) for message in messages]
        return (tokenizer or self._tokenizer).encode_chat(
            [message.for_template() for message in messages],
            tools=[tool.for_template() for tool in tools] if self._knows_tools else [],
            form=form,
            max_tokens=max_tokens,
        )

    def _find_format(self, chosen: ToolFormatName | None) -> ToolFormat | None:
        if chosen is not None:
            return TOOL_FORMATS[chosen]
        if not self._knows_tools:
            return HERMES
        talk = _with_call(as_text=self._takes_arguments_as_text)
        written = rendered(self._tokenizer, talk, [_PROBE_TOOL])
        found = (name for name, pattern in _WRITTEN if re.search(pattern, written))
        return next((TOOL_FORMATS[name] for name in found), None)

    def _with_written_calls(self, message: ChatMessage) -> ChatMessage:
        calls = (replace(call, is_written_as_text=True) for call in message.calls)
        return replace(message, calls=tuple(calls))

    def _described(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool]
    ) -> list[ChatMessage]:
        plain = [self._without_calls(message) for message in messages]
        if not tools:
            return plain
        text = describe_tools(self.tool_format, tools)
        if plain[0].role != "system":
            return [ChatMessage("system", text), *plain]
        return [ChatMessage("system", f"{plain[0].text}\n\n{text}"), *plain[1:]]

    def _without_calls(self, message: ChatMessage) -> ChatMessage:
        if message.role == "tool":
            return ChatMessage("user", f"<tool_response>\n{message.text}\n</tool_response>")
        if not message.calls:
            return message
        calls = self.tool_format.write([(call.name, call.arguments) for call in message.calls])
        text = f"{message.text}\n{calls}" if message.text else calls
        return replace(message, text=text, calls=())


def describe_tools(written: ToolFormat, tools: Sequence[Tool]) -> str:
    """Describes the functions to a model whose template does not support them."""
    functions = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    example = written.write([("name-of-function", {"name-of-argument": "value"})])
    return (
        "# Tools\n\nYou may call functions to help the user. They are described by JSON schemas "
        f"here:\n<tools>\n{functions}\n</tools>\n\nTo call one, answer like this:\n{example}"
    )


def _with_one_text(message: ChatMessage) -> ChatMessage:
    """Without the text before a call if there is reasoning: the template of gpt-oss writes either
    as the reasoning before the call, and refuses both."""
    return replace(message, text="") if message.calls and message.reasoning else message


def _knows_tools(tokenizer: Tokenizer) -> bool:
    return _PROBE in rendered(tokenizer, [ChatMessage("user", "x")], [_PROBE_TOOL])


def _with_call(*, as_text: bool) -> list[ChatMessage]:
    """A conversation with a call and its result."""
    call = replace(_PROBE_CALL, is_written_as_text=as_text)
    calling = ChatMessage("assistant", "", calls=(call,))
    answer = ChatMessage("tool", "x", call_id=call.id, tool_name=_PROBE)
    return [ChatMessage("user", "x"), calling, answer]


def _takes_arguments_as_text(tokenizer: Tokenizer) -> bool:
    """Whether the template appends arguments to a text, as DeepSeek's do."""
    takes_object, takes_text = (
        rendered(tokenizer, _with_call(as_text=as_text), [_PROBE_TOOL]) != ""
        for as_text in (False, True)
    )
    return takes_text and not takes_object
