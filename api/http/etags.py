"""Conditional changes: `ETag` of a response, `If-Match` of a request (RFC 9110).

A route that changes a resource takes `IfMatch` and lets it check the current resource, within the
transaction of the change:

    def change(session: TenantSession) -> Changed[KeyView]:
        key = service.get_key(session, key_id)
        if_match.check(key_view(key))
        ...
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated

import msgspec
from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response

from ..contract.answer_model import AnswerModel
from ..contract.errors import ApiError
from ..contract.promises import terms
from .json_response import json_response

ANY = "*"
TAGGED = {"etag": "ETag for the `If-Match` header of a change."}
"""The header of an answer by `tagged_response`."""
_DIGEST_BYTES = 12


def etag_of(view: AnswerModel) -> str:
    """A strong tag of the resource, quoted.

    Fields listed in the class's `volatile` (figures that change by themselves, such as the last use
    of a key) do not affect it.
    """
    volatile: Iterable[str] = getattr(view, "volatile", ())
    fields = msgspec.to_builtins(view)
    for name in volatile:
        fields.pop(name, None)
    digest = hashlib.blake2b(msgspec.json.encode(fields, order="sorted"), digest_size=_DIGEST_BYTES)
    return f'"{digest.hexdigest()}"'


def tagged_response(view: AnswerModel, status_code: int = 200) -> Response:
    """The resource as JSON, with its `ETag`."""
    answer = json_response(view, status_code)
    answer.headers["etag"] = etag_of(view)
    return answer


class Condition:
    """The condition of a changing request on its resource; without `If-Match` there is none."""

    def __init__(self, tags: frozenset[str]) -> None:
        self._tags = tags

    def check(self, view: AnswerModel | None) -> None:
        """`view` is the current resource, None if it does not exist yet.

        Raises ApiError `etag_mismatch`.
        """
        if self._tags and (view is None or not self._names(view)):
            raise ApiError("etag_mismatch")

    def _names(self, view: AnswerModel) -> bool:
        return ANY in self._tags or etag_of(view) in self._tags


@terms(
    errors=("etag_mismatch",),
    request_headers={"If-Match": "Change it only if its `ETag` is one of these."},
)
async def read_condition(request: Request) -> Condition:
    """The condition in `If-Match`: tags separated by commas, or `*`. A weak tag never matches."""
    sent = request.headers.getlist("if-match")
    return Condition(frozenset(tag.strip() for value in sent for tag in value.split(",")))


IfMatch = Annotated[Condition, Depends(read_condition)]
