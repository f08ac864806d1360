"""Splits an output in harmony, the format of gpt-oss, into its messages.

A message is `<|channel|>CHANNEL<|message|>text<|end|>`, and the next one begins with
`<|start|>assistant`. One with a recipient calls it: `<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{...}<|call|>`. The recipient may also precede the channel. The last
message ends with `<|return|>`. Source: OpenAI's "harmony response format".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from .marker import num_begun

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
HARMONY_MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ANALYSIS = "analysis"
"""The channel of the reasoning."""
FINAL = "final"
"""The channel of the answer."""
_RECIPIENT = "to="
_HEADER_STARTS = (CHANNEL, START, MESSAGE, _RECIPIENT)
_ENDS = (END, CALL, RETURN, START)
_MAX_HEADER_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class MessageOpened:
    """A message begins."""

    channel: str
    """Empty if the model wrote none."""
    recipient: str = ""
    """Empty: the user."""
    header: str = ""
    """As the model wrote it."""

    @property
    def is_reasoning(self) -> bool:
        return self.channel == ANALYSIS and not self.recipient


@dataclass(frozen=True, slots=True)
class MessageText:
    """The next piece of the message's text."""

    text: str


@dataclass(frozen=True, slots=True)
class MessageClosed:
    """The message is complete."""


HarmonyEvent = MessageOpened | MessageText | MessageClosed


class _Place(Enum):
    BETWEEN = auto()
    """Before a message: at the beginning of the output, which follows `<|start|>assistant`, and
    after a message."""
    HEADER = auto()
    TEXT = auto()


class HarmonyMessages:
    """Reads one output. Text outside of messages is a message in the final channel. Messages do not
    depend on how the output was split."""

    def __init__(self, *, is_continued: bool = False) -> None:
        """`is_continued`: the output continues the text of a message in the final channel."""
        self._pending = ""
        self._place = _Place.BETWEEN
        self._is_first = True
        if is_continued:
            self._place = _Place.TEXT

    def push(self, text: str) -> list[HarmonyEvent]:
        """What is certain now."""
        self._pending += text
        events: list[HarmonyEvent] = []
        while True:
            before = (self._place, len(self._pending))
            events += self._read()
            if before == (self._place, len(self._pending)):
                return events

    def finish(self) -> list[HarmonyEvent]:
        """The output is complete: return what was held back. A header without text is dropped."""
        rest, self._pending = self._pending, ""
        match self._place:
            case _Place.TEXT:
                return [MessageText(rest)] if rest else []
            case _Place.BETWEEN if rest.strip() or (rest and self._is_first):
                return [MessageOpened(FINAL), MessageText(rest)]
        return []

    def _read(self) -> Iterator[HarmonyEvent]:
        match self._place:
            case _Place.BETWEEN:
                return self._read_between()
            case _Place.HEADER:
                return self._read_header()
            case _Place.TEXT:
                return self._read_text()

    def _read_between(self) -> Iterator[HarmonyEvent]:
        begun = self._pending.lstrip()
        if any(start.startswith(begun) for start in _HEADER_STARTS):
            return
        if begun.startswith(_HEADER_STARTS):
            self._place = _Place.HEADER
        else:
            self._place = _Place.TEXT
            yield MessageOpened(FINAL)
        self._is_first = False

    def _read_header(self) -> Iterator[HarmonyEvent]:
        header, found, rest = self._pending.partition(MESSAGE)
        if found:
            self._pending, self._place = rest, _Place.TEXT
            yield _opened(header)
        elif len(header) > _MAX_HEADER_CHARACTERS:
            self._place = _Place.TEXT
            yield MessageOpened(FINAL)

    def _read_text(self) -> Iterator[HarmonyEvent]:
        places = [(self._pending.find(end), end) for end in _ENDS]
        found, end = min(((at, end) for at, end in places if at >= 0), default=(-1, ""))
        if found < 0:
            num_held = max(num_begun(self._pending, end) for end in _ENDS)
            found = len(self._pending) - num_held
        text, self._pending = self._pending[:found], self._pending[found:]
        if text:
            yield MessageText(text)
        if end:
            self._pending = self._pending.removeprefix("" if end == START else end)
            self._place = _Place.BETWEEN
            yield MessageClosed()


def _opened(header: str) -> MessageOpened:
    """A header up to `<|message|>`."""
    _, _, after = header.partition(CHANNEL)
    words = header.replace(CHANNEL, " ").replace(CONSTRAIN, " ").split()
    recipients = [word.removeprefix(_RECIPIENT) for word in words if word.startswith(_RECIPIENT)]
    named = after.replace(CONSTRAIN, " ").split()
    channel = named[0] if named and not named[0].startswith(_RECIPIENT) else ""
    return MessageOpened(channel, recipients[0] if recipients else "", header)
