"""`NAME[@VERSION]`."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.api.client.api_client import ApiClient, Filter
from loraplex.api.client.errors import InvalidArgument, NotFound
from loraplex.api.client.references import Reference, find_number, parse_reference


class Answering(ApiClient):
    """A server that knows one adapter."""

    def __init__(self, versions: dict[int, str], **aliases: int) -> None:
        self._adapter = {
            "aliases": aliases,
            "versions": [{"version": number, "state": state} for number, state in versions.items()],
        }

    def get(self, path: str, **query: Filter) -> Any:
        assert path == "/adapters/bot"
        return self._adapter


@pytest.mark.parametrize(
    ("text", "version"),
    [("bot", None), ("bot@3", 3), ("bot@prod", "prod"), ("bot@latest", "latest")],
)
def test_a_reference_is_taken_apart(text: str, version: int | str | None) -> None:
    assert parse_reference(text) == Reference("bot", version)


@pytest.mark.parametrize(
    "text",
    ["", "@3", "./bot", "/bot", "acme/bot", "bot/", "Bot", "bot@", "bot@03", "bot@0", "bot@-1",
     "bot@٣", "bot@1234567890", "bot@sha256:0", "bot@a@b", "bot@../x", ".."],
)  # fmt: skip
def test_what_names_no_version_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        parse_reference(text)
    assert "NAME@VERSION" in str(refusal.value)


@pytest.mark.parametrize(
    ("version", "versions", "aliases", "number"),
    [
        (3, {}, {}, 3),
        (None, {1: "ready", 2: "ready"}, {"prod": 1}, 1),
        (None, {1: "ready", 2: "ready", 3: "rejected"}, {"blue": 1}, 2),
        (None, {1: "rejected", 2: "attesting"}, {}, 2),
        ("latest", {1: "ready", 2: "ready"}, {"prod": 1}, 2),
        ("blue", {1: "ready", 2: "ready"}, {"blue": 1}, 1),
    ],
)
def test_a_reference_means_what_a_request_would_get(
    version: int | str | None, versions: dict[int, str], aliases: dict[str, int], number: int
) -> None:
    assert find_number(Answering(versions, **aliases), Reference("bot", version)) == number


def test_an_alias_that_is_not_there_is_not_found() -> None:
    with pytest.raises(NotFound):
        find_number(Answering({1: "ready"}), Reference("bot", "blue"))
