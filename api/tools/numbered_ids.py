"""The ids of past calls, for models that read a call's name in its id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .call_spelling import NumberedSpelling
from .conversation import ChatMessage, PastCall


def with_numbered_ids(
    messages: Sequence[ChatMessage], spelling: NumberedSpelling
) -> list[ChatMessage]:
    """The conversation with ids as the model writes them: `functions.f:0`, with the number of the
    call in the conversation. Ids that are of this form stay as they are."""
    ids: dict[str, str] = {}
    for call in (call for message in messages for call in message.calls):
        ids[call.id] = call.id if _is_own(call, spelling) else spelling.id(call.name, len(ids))
    return [
        replace(
            message,
            calls=tuple(replace(call, id=ids[call.id]) for call in message.calls),
            call_id=message.call_id and ids.get(message.call_id, message.call_id),
        )
        for message in messages
    ]


def _is_own(call: PastCall, spelling: NumberedSpelling) -> bool:
    before, _, number = call.id.rpartition(spelling.number_start)
    return before.removeprefix(spelling.before) == call.name and number.isdecimal()
