"""Stored responses: the conversation before a request, and what is stored of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
from pydantic import TypeAdapter, ValidationError

from ...platform.base import utc_now
from ...platform.keys.principal import Principal
from ...platform.responses import service
from ...platform.responses.models import StoredResponse
from ...platform.sessions import TenantSession
from ..contract.errors import ApiError
from ..control_plane.control_plane import ControlPlane
from ..http.json_response import encode_json
from ..schemas.messages import MAX_MESSAGES
from ..schemas.response_objects import Response
from ..schemas.responses import InputItem, ResponsesBody

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
_ID_KINDS = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


class Earlier(NamedTuple):
    """The conversation that a request continues."""

    ids: Sequence[str]
    """Of its stored responses, the oldest first."""
    items: Sequence[InputItem]
    """The input and output of each of them."""


NOTHING_EARLIER = Earlier((), ())


async def load_earlier(
    control_plane: ControlPlane, principal: Principal, response_id: str
) -> Earlier:
    """The conversation that ends with this response.

    Raises ResponseNotFound or ConversationTooLarge; ApiError if the response ends with a call whose
    arguments cannot be read.
    """

    def load(session: TenantSession) -> Earlier:
        found = service.list_conversation(session, response_id, viewer=principal)
        items = [item for each in found for item in _conversation_items(each)]
        return Earlier([each.id for each in found], _ITEMS.validate_python(items))

    try:
        return await control_plane.read(principal.tenant_id, load)
    except ValidationError as exc:
        raise ApiError(
            "invalid_parameter",
            "previous_response_id: the response ends with a call whose arguments are not a JSON "
            "object",
            param="previous_response_id",
        ) from exc


def continued(body: ResponsesBody, earlier: Earlier) -> ResponsesBody:
    """The request with the earlier items before its input. Raises ApiError if they are too
    many."""
    if len(earlier.items) + len(body.input) > MAX_MESSAGES:
        raise ApiError(
            "invalid_parameter",
            f"input: has {len(body.input)} items after the {len(earlier.items)} of earlier "
            f"responses; a conversation has at most {MAX_MESSAGES}",
            param="input",
        )
    return body.model_copy(update={"input": [*earlier.items, *body.input]})


def stored_input(response: StoredResponse) -> list[dict[str, Any]]:
    """The items of the request's own input, as they are returned."""
    items: list[dict[str, Any]] = msgspec.json.decode(response.input)
    return items


class ResponseRecord:
    """Stores the response of one request when it is complete."""

    def __init__(
        self,
        control_plane: ControlPlane,
        principal: Principal,
        body: ResponsesBody,
        *,
        request_id: str,
        earlier: Earlier,
        kept_for: timedelta,
    ) -> None:
        self._control_plane = control_plane
        self._principal = principal
        self._previous_id = body.previous_response_id
        self._input = msgspec.json.encode(list(_with_ids(body.input, request_id)))
        self._earlier = earlier
        self._kept_for = kept_for

    async def check_room(self) -> None:
        """Call it before anything is generated. Raises QuotaExceeded."""
        await self._control_plane.read(
            self._principal.tenant_id,
            lambda session: service.check_room(session, len(self._input)),
        )

    async def store(self, response: Response) -> None:
        """Raises DatabaseUnavailable."""
        content, now = encode_json(response), utc_now()
        row = StoredResponse(
            id=response.id,
            key_id=self._principal.key_id,
            previous_id=self._previous_id,
            size_bytes=len(self._input) + len(content),
            created_at=now,
            expires_at=now + self._kept_for,
            input=self._input,
            response=content,
        )
        await self._control_plane.write(
            self._principal.tenant_id,
            lambda session: service.add(session, row, self._earlier.ids),
        )


def _conversation_items(response: StoredResponse) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = msgspec.json.decode(response.response)["output"]
    return [*stored_input(response), *output]


def _with_ids(items: Sequence[InputItem], request_id: str) -> Iterator[dict[str, Any]]:
    """Each item with an id of ours: a client's may be missing, or that of another item."""
    for number, item in enumerate(items):
        dumped = item.model_dump(mode="json", by_alias=True, exclude_unset=True)
        kind = dumped.setdefault("type", "message")
        item_id = f"{_ID_KINDS[kind]}_{request_id}_in_{number}"
        yield {"status": "completed", **dumped, "id": item_id}
