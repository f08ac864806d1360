"""`ETag` and `If-Match`: a change applies only to the version that its caller has read."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import pytest
from starlette.requests import Request

from loraplex.api.contract.answer_model import Absent, AnswerModel
from loraplex.api.contract.errors import ApiError
from loraplex.api.http.etags import Condition, etag_of, read_condition, tagged_response


@dataclass(frozen=True, slots=True)
class Thing(AnswerModel):
    name: str
    size: int
    last_used_at: str | Absent | None = None
    secret: str | Absent = msgspec.UNSET

    volatile: ClassVar[frozenset[str]] = frozenset({"last_used_at"})


THING = Thing("a", 1)


def condition(*sent: str) -> Condition:
    headers = [(b"if-match", value.encode()) for value in sent]
    return asyncio.run(read_condition(Request({"type": "http", "headers": headers})))


def holds(condition: Condition) -> bool:
    try:
        condition.check(THING)
    except ApiError as error:
        return error.code != "etag_mismatch"
    return True


def test_a_tag_follows_what_can_be_changed_and_nothing_else() -> None:
    assert etag_of(THING) == etag_of(Thing("a", 1))
    assert etag_of(THING) == etag_of(Thing("a", 1, "now"))
    assert etag_of(THING) == etag_of(Thing("a", 1, msgspec.UNSET))
    assert len({etag_of(THING), etag_of(Thing("a", 2)), etag_of(Thing("b", 1))}) == 3


def test_an_answer_carries_the_tag_that_its_change_needs() -> None:
    answer = tagged_response(THING)
    assert holds(condition(answer.headers["etag"]))
    assert json.loads(bytes(answer.body)) == {"name": "a", "size": 1, "last_used_at": None}


@pytest.mark.parametrize("sent", ["*", 'W/"x", {tag}', '{tag} , "x"'])
def test_a_condition_that_names_the_resource_holds(sent: str) -> None:
    assert holds(condition(sent.format(tag=etag_of(THING))))


@pytest.mark.parametrize("sent", ['"x"', "", "W/{tag}", "{tag}x", '"x", "y"'])
def test_any_other_condition_does_not(sent: str) -> None:
    assert not holds(condition(sent.format(tag=etag_of(THING))))


def test_without_a_condition_every_change_is_made() -> None:
    assert holds(condition())


def test_what_is_not_there_meets_no_condition() -> None:
    condition().check(None)
    for sent in ("*", etag_of(THING)):
        with pytest.raises(ApiError) as refusal:
            condition(sent).check(None)
        assert refusal.value.code == "etag_mismatch"


def test_several_headers_are_one_list() -> None:
    assert holds(condition('"x"', etag_of(THING)))
