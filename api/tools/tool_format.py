"""The formats in which models write calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .call_scanner import CallScanner
from .call_spelling import (
    CallSpelling,
    EitherSpelling,
    NamedSpelling,
    ObjectSpelling,
    Schemas,
    TaggedSpelling,
)
from .tagged_scanner import Tags

ARGS = "[ARGS]"
_OBJECT = ObjectSpelling()


class ToolFormatName(StrEnum):
    """The values of `--tool-format`. The names are vLLM's but for `mistral_args`."""

    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    GLM45 = "glm45"
    GRANITE = "granite"
    HERMES = "hermes"
    INTERNLM = "internlm"
    JAMBA = "jamba"
    LLAMA = "llama3_json"
    MINIMAX_M2 = "minimax_m2"
    MISTRAL = "mistral"
    MISTRAL_ARGS = "mistral_args"
    PHI4_MINI = "phi4_mini_json"
    QWEN3_CODER = "qwen3_coder"
    SEED_OSS = "seed_oss"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of calls in an answer: `opening before call (between call)* after`."""

    name: ToolFormatName
    opening: str
    """The marker before a call."""
    before: str
    between: str
    after: str
    spelling: CallSpelling = _OBJECT
    """How a call is written."""
    is_bare: bool = False
    """An answer that begins with an object is a call, without `opening`."""
    lead_ins: tuple[str, ...] = ()
    """What may occur between `opening` and the first call, besides blanks."""
    separators: tuple[str, ...] = ()
    """What may follow a call, besides blanks, and is not text."""
    reopening: str | None = None
    """What another call may begin with instead of `opening`."""
    hidden_markers: tuple[str, ...] = ()
    """Other markers of this format that may be special tokens of the base."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that may be special tokens, which answers otherwise omit."""
        return (self.opening, *self.separators, *self.hidden_markers)

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls, each a name and its arguments, as a model would write them."""
        spelling = self.spelling
        written = [
            spelling.head(name) + spelling.arguments(arguments) + spelling.tail
            for name, arguments in calls
        ]
        opening = "" if self.is_bare else self.opening
        return opening + self.before + self.between.join(written) + self.after

    def scanner(self, first: str, names: Collection[str], schemas: Schemas) -> CallScanner | None:
        """The scanner for a call that begins with this character; None if there is none."""
        return self.spelling.scanner(first, names, schemas)


_MISTRAL_NAMED = NamedSpelling(before="", after=ARGS, name_end="[")
HERMES = ToolFormat(
    ToolFormatName.HERMES,
    opening="<tool_call>",
    before="\n",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
    separators=("</tool_call>",),
)
LLAMA = ToolFormat(
    ToolFormatName.LLAMA,
    opening="<|python_tag|>",
    before="",
    between="; ",
    after="",
    spelling=ObjectSpelling("parameters"),
    is_bare=True,
    separators=(";",),
    reopening="{",
)
MISTRAL = ToolFormat(
    ToolFormatName.MISTRAL,
    opening="[TOOL_CALLS]",
    before=" [",
    between=", ",
    after="]",
    spelling=EitherSpelling(ObjectSpelling(), _MISTRAL_NAMED),
    lead_ins=("[",),
    separators=(",", "]"),
    reopening="{",
    hidden_markers=(ARGS, "[CALL_ID]"),
)
MISTRAL_ARGS = ToolFormat(
    ToolFormatName.MISTRAL_ARGS,
    opening="[TOOL_CALLS]",
    before="",
    between="[TOOL_CALLS]",
    after="",
    spelling=EitherSpelling(_MISTRAL_NAMED, ObjectSpelling()),
    lead_ins=("[",),
    separators=(",", "]"),
    reopening="{",
    hidden_markers=(ARGS, "[CALL_ID]"),
)
GRANITE = ToolFormat(
    ToolFormatName.GRANITE,
    opening="<|tool_call|>",
    before="[",
    between=", ",
    after="]",
    lead_ins=("[",),
    separators=(",", "]"),
    reopening="{",
)
JAMBA = ToolFormat(
    ToolFormatName.JAMBA,
    opening="<tool_calls>",
    before="[\n    ",
    between=",\n    ",
    after="\n]</tool_calls>",
    lead_ins=("[",),
    separators=(",", "]", "</tool_calls>"),
    reopening="{",
)
PHI4_MINI = ToolFormat(
    ToolFormatName.PHI4_MINI,
    opening="functools",
    before="[",
    between=", ",
    after="]",
    lead_ins=("[",),
    separators=(",", "]"),
    reopening="{",
)
INTERNLM = ToolFormat(
    ToolFormatName.INTERNLM,
    opening="<|action_start|>",
    before="<|plugin|>\n",
    between="<|action_end|>\n<|action_start|><|plugin|>\n",
    after="<|action_end|>",
    spelling=ObjectSpelling("parameters"),
    lead_ins=("<|plugin|>",),
    separators=("<|action_end|>",),
    hidden_markers=("<|plugin|>",),
)
_DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_CALL_END = "<｜tool▁call▁end｜>"
_DEEPSEEK_CALLS_END = "<｜tool▁calls▁end｜>"
_DEEPSEEK_NAME = "<｜tool▁sep｜>"
DEEPSEEK_V3 = ToolFormat(
    ToolFormatName.DEEPSEEK_V3,
    opening=_DEEPSEEK_CALLS,
    before=_DEEPSEEK_CALL,
    between=f"{_DEEPSEEK_CALL_END}\n{_DEEPSEEK_CALL}",
    after=_DEEPSEEK_CALL_END + _DEEPSEEK_CALLS_END,
    spelling=NamedSpelling(
        before=f"function{_DEEPSEEK_NAME}", after="\n```json\n", name_end="\n", tail="\n```"
    ),
    lead_ins=(_DEEPSEEK_CALL,),
    separators=("```", _DEEPSEEK_CALL_END, _DEEPSEEK_CALLS_END),
    reopening=_DEEPSEEK_CALL,
    hidden_markers=(_DEEPSEEK_CALL, _DEEPSEEK_NAME),
)
DEEPSEEK_V31 = ToolFormat(
    ToolFormatName.DEEPSEEK_V31,
    opening=_DEEPSEEK_CALLS,
    before=_DEEPSEEK_CALL,
    between=_DEEPSEEK_CALL_END + _DEEPSEEK_CALL,
    after=_DEEPSEEK_CALL_END + _DEEPSEEK_CALLS_END,
    spelling=NamedSpelling(before="", after=_DEEPSEEK_NAME, name_end=_DEEPSEEK_NAME),
    lead_ins=(_DEEPSEEK_CALL,),
    separators=(_DEEPSEEK_CALL_END, _DEEPSEEK_CALLS_END),
    reopening=_DEEPSEEK_CALL,
    hidden_markers=(_DEEPSEEK_CALL, _DEEPSEEK_NAME),
)


def _tagged_by_equals(name: ToolFormatName, marker: str) -> ToolFormat:
    """Qwen 3 Coder's format, between a marker of one's own."""
    tags = Tags(
        name_open="<function=",
        name_close=">",
        key_open="<parameter=",
        key_close=">",
        value_open="",
        value_close="</parameter>",
        call_close="</function>",
    )
    return ToolFormat(
        name,
        opening=f"<{marker}>",
        before="\n",
        between=f"\n</{marker}>\n<{marker}>\n",
        after=f"\n</{marker}>",
        spelling=TaggedSpelling(tags, value_break="\n"),
        separators=(f"</{marker}>",),
    )


QWEN3_CODER = _tagged_by_equals(ToolFormatName.QWEN3_CODER, "tool_call")
SEED_OSS = _tagged_by_equals(ToolFormatName.SEED_OSS, "seed:tool_call")
MINIMAX_M2 = ToolFormat(
    ToolFormatName.MINIMAX_M2,
    opening="<minimax:tool_call>",
    before="\n",
    between="",
    after="</minimax:tool_call>",
    spelling=TaggedSpelling(
        Tags(
            name_open='<invoke name="',
            name_close='">',
            key_open='<parameter name="',
            key_close='">',
            value_open="",
            value_close="</parameter>",
            call_close="</invoke>",
        ),
        call_break="\n",
    ),
    separators=("</minimax:tool_call>",),
    reopening="<invoke",
)
GLM45 = ToolFormat(
    ToolFormatName.GLM45,
    opening="<tool_call>",
    before="",
    between="\n<tool_call>",
    after="",
    spelling=TaggedSpelling(
        Tags(
            name_open="",
            name_close="",
            key_open="<arg_key>",
            key_close="</arg_key>",
            value_open="<arg_value>",
            value_close="</arg_value>",
            call_close="</tool_call>",
        )
    ),
    hidden_markers=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
TOOL_FORMATS: Mapping[ToolFormatName, ToolFormat] = {
    written.name: written
    for written in (
        *(HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, GRANITE, JAMBA, PHI4_MINI, INTERNLM),
        *(DEEPSEEK_V3, DEEPSEEK_V31, QWEN3_CODER, SEED_OSS, MINIMAX_M2, GLM45),
    )
}
