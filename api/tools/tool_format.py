"""The formats in which models write calls, and their detection from the base's chat template."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .call_scanner import CallScanner, NamedCallScanner, ObjectCallScanner

ARGS = "[ARGS]"


class ToolFormatName(StrEnum):
    """The values of `--tool-format`."""

    HERMES = "hermes"
    LLAMA = "llama3_json"
    MISTRAL = "mistral"
    MISTRAL_ARGS = "mistral_args"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of calls in an answer: `opening before call (between call)* after`."""

    name: ToolFormatName
    opening: str
    """The marker before a call."""
    before: str
    between: str
    after: str
    is_bare: bool = False
    """An answer that begins with an object is a call, without `opening`."""
    lead_ins: tuple[str, ...] = ()
    """What may occur between `opening` and the first call, besides blanks."""
    separators: tuple[str, ...] = ()
    """What may follow a call, besides blanks, and is not text."""
    is_list: bool = False
    """Whether another call may follow without `opening`."""
    arguments_key: str | None = "arguments"
    """None: a call is written as its name, `[ARGS]` and the arguments."""
    hidden_markers: tuple[str, ...] = ()
    """Other markers of this format that may be special tokens of the base."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that may be special tokens, which answers otherwise omit."""
        return (self.opening, *self.separators, *self.hidden_markers)

    def call_head(self, name: str) -> str:
        """The text before a call's arguments."""
        if self.arguments_key is None:
            return f"{name}{ARGS}"
        return f'{{"name": {json.dumps(name)}, "{self.arguments_key}": '

    @property
    def call_tail(self) -> str:
        return "" if self.arguments_key is None else "}"

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls, each a name and its arguments, as a model would write them."""
        written = [
            self.call_head(name) + json.dumps(arguments, ensure_ascii=False) + self.call_tail
            for name, arguments in calls
        ]
        opening = "" if self.is_bare else self.opening
        return opening + self.before + self.between.join(written) + self.after

    def scanner(self, first: str, names: Collection[str]) -> CallScanner | None:
        """The scanner for a call that begins with this character; None if there is none."""
        if first == "{":
            return ObjectCallScanner(names)
        is_name = first.isalnum() or first in "_-"
        if is_name and self.name in (ToolFormatName.MISTRAL, ToolFormatName.MISTRAL_ARGS):
            return NamedCallScanner(names)
        return None


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
    is_bare=True,
    is_list=True,
    separators=(";",),
    arguments_key="parameters",
)
MISTRAL = ToolFormat(
    ToolFormatName.MISTRAL,
    opening="[TOOL_CALLS]",
    before=" [",
    between=", ",
    after="]",
    lead_ins=("[",),
    separators=(",", "]"),
    is_list=True,
    hidden_markers=(ARGS, "[CALL_ID]"),
)
MISTRAL_ARGS = ToolFormat(
    ToolFormatName.MISTRAL_ARGS,
    opening="[TOOL_CALLS]",
    before="",
    between="[TOOL_CALLS]",
    after="",
    lead_ins=("[",),
    separators=(",", "]"),
    is_list=True,
    arguments_key=None,
    hidden_markers=(ARGS, "[CALL_ID]"),
)
TOOL_FORMATS: Mapping[ToolFormatName, ToolFormat] = {
    written.name: written for written in (HERMES, LLAMA, MISTRAL, MISTRAL_ARGS)
}
