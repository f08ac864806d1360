"""The formats in which models write calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from .call_scanner import CallScanner
from .call_spelling import (
    CallSpelling,
    EitherSpelling,
    NamedSpelling,
    NumberedSpelling,
    ObjectSpelling,
    PythonicSpelling,
    Schemas,
    TaggedSpelling,
)
from .harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START
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
    HUNYUAN_A13B = "hunyuan_a13b"
    INTERNLM = "internlm"
    JAMBA = "jamba"
    KIMI_K2 = "kimi_k2"
    LFM2 = "lfm2"
    LLAMA = "llama3_json"
    LLAMA4_PYTHONIC = "llama4_pythonic"
    MINIMAX_M2 = "minimax_m2"
    MISTRAL = "mistral"
    MISTRAL_ARGS = "mistral_args"
    OPENAI = "openai"
    PHI4_MINI = "phi4_mini_json"
    PYTHONIC = "pythonic"
    QWEN3_CODER = "qwen3_coder"
    SEED_OSS = "seed_oss"
    STEP3 = "step3"
    XLAM = "xlam"


@dataclass(frozen=True, slots=True)
class BareStart:
    """The start of answers that are calls without a marker before them."""

    text: str
    """An answer that begins with it may be calls."""
    free: str
    """A regular expression, in Lark's syntax, for the answers that begin otherwise: an answer that
    is to follow a grammar is one of these or calls."""


_BARE_OBJECT = BareStart("{", r"([^{\s](.|\n)*)?")
_BARE_OBJECTS = BareStart("[", r"([^\[\s](.|\n)*|\[([^{\s](.|\n)*)?)?")
_BARE_EXPRESSIONS = BareStart("[", r"([^\[\s](.|\n)*|\[([^A-Za-z_\s](.|\n)*)?)?")


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
    bare: BareStart | None = None
    """How an answer begins that is calls without `opening`; None: there are no such answers."""
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

    @property
    def is_plain_json(self) -> bool:
        """Whether an answer in JSON may be calls."""
        return self.bare is not None and isinstance(self.spelling, ObjectSpelling)

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls, each a name and its arguments, as a model would write them."""
        spelling = self.spelling
        written = [
            spelling.head(name, str(number)) + spelling.arguments(arguments) + spelling.tail
            for number, (name, arguments) in enumerate(calls)
        ]
        opening = "" if self.bare else self.opening
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
    bare=_BARE_OBJECT,
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
HUNYUAN_A13B = replace(
    JAMBA,
    name=ToolFormatName.HUNYUAN_A13B,
    before="[",
    between=", ",
    after="]</tool_calls>",
)
XLAM = ToolFormat(
    ToolFormatName.XLAM,
    opening="```json",
    before="[",
    between=", ",
    after="]",
    bare=_BARE_OBJECTS,
    lead_ins=("[",),
    separators=(",", "]", "```"),
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

KIMI_K2 = ToolFormat(
    ToolFormatName.KIMI_K2,
    opening="<|tool_calls_section_begin|>",
    before="<|tool_call_begin|>",
    between="<|tool_call_end|><|tool_call_begin|>",
    after="<|tool_call_end|><|tool_calls_section_end|>",
    spelling=NumberedSpelling(
        before="functions.", number_start=":", after="<|tool_call_argument_begin|>"
    ),
    lead_ins=("<|tool_call_begin|>",),
    separators=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    reopening="<|tool_call_begin|>",
    hidden_markers=("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
)

_HARMONY_CALL = f"{CHANNEL}commentary to=functions."
OPENAI = ToolFormat(
    ToolFormatName.OPENAI,
    opening=_HARMONY_CALL,
    before="",
    between=f"{CALL}{START}assistant{_HARMONY_CALL}",
    after=CALL,
    spelling=NamedSpelling(before="", after=f" {CONSTRAIN}json{MESSAGE}", name_end=" "),
    separators=(CALL, f"{START}assistant"),
    hidden_markers=(START, CHANNEL, CONSTRAIN, MESSAGE, END),
)


def _pythonic(
    name: ToolFormatName, opening: str, *closings: str, bare: BareStart | None
) -> ToolFormat:
    """A list of calls as Python writes them, between markers of one's own."""
    return ToolFormat(
        name,
        opening=opening,
        before="[",
        between=", ",
        after="".join(("]", *closings)) if bare is None else "]",
        spelling=PythonicSpelling(),
        bare=bare,
        lead_ins=("[", ","),
        separators=("]", *closings),
        reopening=",",
    )


PYTHONIC = _pythonic(ToolFormatName.PYTHONIC, "<|python_tag|>", bare=_BARE_EXPRESSIONS)
LLAMA4_PYTHONIC = _pythonic(
    ToolFormatName.LLAMA4_PYTHONIC, "<|python_start|>", "<|python_end|>", bare=_BARE_EXPRESSIONS
)
LFM2 = _pythonic(ToolFormatName.LFM2, "<|tool_call_start|>", "<|tool_call_end|>", bare=None)


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
_STEP3_CALL = "<｜tool_call_begin｜>"
_STEP3_CALL_END = "<｜tool_call_end｜>"
_STEP3_CALLS_END = "<｜tool_calls_end｜>"
_STEP3_SEPARATOR = "<｜tool_sep｜>"
STEP3 = ToolFormat(
    ToolFormatName.STEP3,
    opening="<｜tool_calls_begin｜>",
    before=f"\n{_STEP3_CALL}function{_STEP3_SEPARATOR}",
    between=f"{_STEP3_CALL_END}\n{_STEP3_CALL}function{_STEP3_SEPARATOR}",
    after=f"{_STEP3_CALL_END}\n{_STEP3_CALLS_END}",
    spelling=TaggedSpelling(
        Tags(
            name_open='<steptml:invoke name="',
            name_close='">',
            key_open='<steptml:parameter name="',
            key_close='">',
            value_open="",
            value_close="</steptml:parameter>",
            call_close="</steptml:invoke>",
        )
    ),
    lead_ins=(_STEP3_CALL, "function", _STEP3_SEPARATOR),
    separators=(_STEP3_CALL_END, _STEP3_CALLS_END),
    reopening=_STEP3_CALL,
    hidden_markers=(_STEP3_CALL, _STEP3_SEPARATOR),
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
        *(HUNYUAN_A13B, XLAM, KIMI_K2, PYTHONIC, LLAMA4_PYTHONIC, LFM2, STEP3, OPENAI),
    )
}
