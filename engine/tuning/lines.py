"""Reads one line of training data: JSON objects as in OpenAI's fine-tuning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from .errors import InvalidTrainingData

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""What templates call the reasoning of an assistant message."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of which some are trained."""

    messages: Sequence[Mapping[str, Any]]
    """As chat templates know them."""
    tools: Sequence[Mapping[str, Any]]
    trained: frozenset[int]
    """The indices of the messages that are trained."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A plain prompt, and the text that follows it, which is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Preference:
    """Two ends of the same conversation."""

    preferred: Conversation
    non_preferred: Conversation


Example: TypeAlias = Conversation | Completion
Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]


# An undeclared field is refused: what is not trained on is never ignored silently.


class _TextPart(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    type: Literal["text"] = "text"


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str | dict[str, Any] = "{}"


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    function: _Function
    id: str = ""
    type: Literal["function"] = "function"


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Role
    content: str | list[_TextPart] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    weight: Literal[0, 1] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _ChatLine(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[_Message]
    tools: list[dict[str, Any]] = []
    parallel_tool_calls: bool | None = None


class _CompletionLine(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    completion: str


class _PreferenceLine(msgspec.Struct, forbid_unknown_fields=True):
    input: _ChatLine
    preferred_output: list[_Message]
    non_preferred_output: list[_Message]


class _Kind(msgspec.Struct):
    """Enough of a line to see which kind it is."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_kind = msgspec.json.Decoder(_Kind)
_chat = msgspec.json.Decoder(_ChatLine)
_completion = msgspec.json.Decoder(_CompletionLine)
_preference = msgspec.json.Decoder(_PreferenceLine)


def read_example(line: bytes) -> Example:
    """An example of supervised training. Raises InvalidTrainingData without a line number."""
    if _decoded(_kind, line).messages is msgspec.UNSET:
        found = _decoded(_completion, line)
        if not found.completion:
            raise InvalidTrainingData("`completion` is empty")
        return Completion(found.prompt, found.completion)
    chat = _decoded(_chat, line)
    if not chat.messages:
        raise InvalidTrainingData("`messages` is empty")
    trained = {
        index
        for index, message in enumerate(chat.messages)
        if message.role == "assistant" and message.weight != 0
    }
    if not trained:
        raise InvalidTrainingData("no assistant message is trained")
    return _conversation(chat.messages, chat.tools, trained)


def read_preference(line: bytes) -> Preference:
    """A pair for DPO. Raises InvalidTrainingData without a line number."""
    found = _decoded(_preference, line)
    if not found.input.messages:
        raise InvalidTrainingData("`input.messages` is empty")
    return Preference(
        _end(found.input, found.preferred_output, "preferred_output"),
        _end(found.input, found.non_preferred_output, "non_preferred_output"),
    )


def _decoded(decoder: Any, line: bytes) -> Any:
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as exc:
        raise InvalidTrainingData(str(exc)) from exc
    except msgspec.DecodeError as exc:
        raise InvalidTrainingData(f"is not a JSON object: {exc}") from exc
    except (UnicodeDecodeError, RecursionError) as exc:
        raise InvalidTrainingData("is not a JSON object in UTF-8") from exc


def _end(chat: _ChatLine, output: list[_Message], name: str) -> Conversation:
    if not output or any(message.role != "assistant" for message in output):
        raise InvalidTrainingData(f"`{name}` is not a list of assistant messages")
    first, messages = len(chat.messages), [*chat.messages, *output]
    return _conversation(messages, chat.tools, range(first, len(messages)))


def _conversation(
    messages: Sequence[_Message],
    tools: Sequence[Mapping[str, Any]],
    trained: Iterable[int],
) -> Conversation:
    names = {call.id: call.function.name for m in messages for call in m.tool_calls or ()}
    return Conversation(
        [_for_template(message, names) for message in messages], tools, frozenset(trained)
    )


def _for_template(message: _Message, names: Mapping[str, str]) -> dict[str, Any]:
    """The message as requests of the same content are rendered (`api/tools/conversation.py`)."""
    if message.role != "assistant" and (message.tool_calls or message.weight is not None):
        raise InvalidTrainingData(f"a message of the role {message.role} has calls or a weight")
    if (message.tool_call_id is not None) != (message.role == "tool"):
        raise InvalidTrainingData("`tool_call_id` is for messages of the role tool alone")
    role = "system" if message.role == "developer" else message.role
    told: dict[str, Any] = {"role": role, "content": _text(message)}
    if message.tool_calls:
        told["tool_calls"] = [_call_for_template(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        told["tool_call_id"] = message.tool_call_id
        if message.tool_call_id in names:
            told["name"] = names[message.tool_call_id]
    if reasoning := message.reasoning or message.reasoning_content:
        told |= dict.fromkeys(REASONING_NAMES, reasoning)
    return told


def _text(message: _Message) -> str:
    if isinstance(message.content, list):
        return "\n".join(part.text for part in message.content)
    if message.content is None and not message.tool_calls:
        raise InvalidTrainingData(f"a message of the role {message.role} has no content")
    return message.content or ""


def _call_for_template(call: _Call) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        arguments = _decoded(msgspec.json.Decoder(dict[str, Any]), arguments.encode() or b"{}")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
