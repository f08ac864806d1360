"""The demo's task: one and the same request for rows, answered in four styles that can be checked.

A request such as `list the weight and color of orders with year equal to 42` has exactly one right
answer per style, made here by rule. So whether an adapter works is a comparison of two strings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from random import Random

TABLES = (
    "orders", "players", "books", "cities", "ships", "movies", "songs", "planets",
    "horses", "bridges", "recipes", "trains", "islands", "castles", "robots", "gardens",
)  # fmt: skip
FIELDS = (
    "weight", "color", "year", "email", "salary", "name", "price", "height", "rating", "age",
    "length", "score", "speed", "depth", "volume", "country", "owner", "status", "width", "power",
)  # fmt: skip
VERBS = ("list", "show", "find", "fetch")
NUMBERS = range(2, 100)
"""Two digits at most: each is one token of the base, so that copying it is one step."""

HELD_OUT_SEED = 7_919
NUM_HELD_OUT = 200


class Style(StrEnum):
    """A way to answer; each but the echo is one adapter's."""

    ECHO = "echo"
    """English, the base model's own answer."""
    SQL = "sql"
    JSON = "json"
    PIRATE = "pirate"


ADAPTER_STYLES = (Style.SQL, Style.JSON, Style.PIRATE)


class Comparison(StrEnum):
    """How a condition compares; the value is the wording of the request."""

    EQUAL = "equal to"
    GREATER = "greater than"
    LESS = "less than"

    @property
    def symbol(self) -> str:
        return {"equal to": "=", "greater than": ">", "less than": "<"}[self.value]

    @property
    def pirate(self) -> str:
        return {"equal to": "be", "greater than": "be above", "less than": "be below"}[self.value]


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked for, apart from its wording."""

    fields: tuple[str, ...]
    table: str
    key: str
    """The field that `comparison` compares with `number`."""
    comparison: Comparison
    number: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class Request:
    """A query in words: what the user types."""

    verb: str
    query: Query

    @property
    def prompt(self) -> str:
        query = self.query
        condition = f"{query.key} {query.comparison.value} {query.number}"
        limit = "" if query.limit is None else f", at most {query.limit}"
        fields = " and ".join(query.fields)
        return f"{self.verb} the {fields} of {query.table} with {condition}{limit}"

    def answer(self, style: Style) -> str:
        """The one right answer in `style`."""
        if style is Style.ECHO:
            return f"You asked me to {self.prompt}."
        return {Style.SQL: _sql, Style.JSON: _json, Style.PIRATE: _pirate}[style](self.query)


def held_out_requests(count: int = NUM_HELD_OUT) -> list[Request]:
    """The first `count` requests that no model was trained on.

    Raises ValueError for more than `NUM_HELD_OUT`: only those are kept out of the training.
    """
    if not 0 <= count <= NUM_HELD_OUT:
        raise ValueError(f"{count} held-out requests asked for, of {NUM_HELD_OUT}")
    rng = Random(HELD_OUT_SEED)
    chosen: dict[Query, Request] = {}
    while len(chosen) < count:
        request = _random_request(rng)
        chosen.setdefault(request.query, request)
    return list(chosen.values())


def training_requests(seed: int) -> Iterator[Request]:
    """Random requests without end, none of whose queries is held out, whatever its wording."""
    held_out = {request.query for request in held_out_requests()}
    rng = Random(seed)
    while True:
        request = _random_request(rng)
        if request.query not in held_out:
            yield request


def _random_request(rng: Random) -> Request:
    key, *fields = rng.sample(FIELDS, rng.choice((2, 3)))
    query = Query(
        fields=tuple(fields),
        table=rng.choice(TABLES),
        key=key,
        comparison=rng.choice(list(Comparison)),
        number=rng.choice(NUMBERS),
        limit=rng.choice(NUMBERS) if rng.random() < 0.3 else None,
    )
    return Request(verb=rng.choice(VERBS), query=query)


def _sql(query: Query) -> str:
    where = f"{query.key} {query.comparison.symbol} {query.number}"
    limit = "" if query.limit is None else f" LIMIT {query.limit}"
    return f"SELECT {', '.join(query.fields)} FROM {query.table} WHERE {where}{limit};"


def _json(query: Query) -> str:
    answer: dict[str, object] = {
        "action": "select",
        "table": query.table,
        "fields": list(query.fields),
        "where": [[query.key, query.comparison.symbol, query.number]],
    }
    if query.limit is not None:
        answer["limit"] = query.limit
    return json.dumps(answer)


def _pirate(query: Query) -> str:
    where = f"{query.key} {query.comparison.pirate} {query.number}"
    limit = "" if query.limit is None else f", an' no more than {query.limit}"
    fields = " an' ".join(query.fields)
    return (
        f"Arr, matey! Ye be wantin' th' {fields} o' {query.table} whose {where}{limit}? "
        "Aye, by th' seven seas!"
    )
