"""What the options of `loraplex usage` and `loraplex quotas set` ask the server for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from typer.testing import CliRunner

from loraplex.api.cli import quotas, usage

LIMITS = {
    "requests_per_minute": 1,
    "input_tokens_per_minute": 2,
    "output_tokens_per_minute": 3,
    "concurrent_requests": 4,
    "tokens_per_period": 5,
    "adapters": 6,
    "versions_per_adapter": 7,
    "stored_bytes": 8,
    "keys": 9,
    "users": 10,
}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Notes what the commands ask for."""
    found = SimpleNamespace(pages=Mock(return_value=[]), admin=Mock())
    found.admin.pages.return_value = []

    @contextmanager
    def opened() -> Iterator[SimpleNamespace]:
        yield found

    for command in (usage, quotas):
        monkeypatch.setattr(command, "open_client", opened)
    return found


def invoke(app: typer.Typer, *arguments: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


def test_usage_is_asked_of_the_days_groups_and_adapter_that_are_named(
    client: SimpleNamespace,
) -> None:
    invoke(usage.app, "--since=2026-03-01", "--until=2026-04-01", "--by=version", "--adapter=bot")
    client.pages.assert_called_once_with(
        "/usage",
        since="2026-03-01",
        until="2026-04-01",
        group_by=["version", "adapter"],
        adapter="bot",
    )


def test_usage_of_all_tenants_is_asked_as_an_operator(client: SimpleNamespace) -> None:
    invoke(usage.app, "--all-tenants", "--by=tenant")
    client.pages.assert_not_called()
    client.admin.pages.assert_called_once_with(
        "/usage", since=None, until=None, group_by=["tenant"], adapter=None
    )


def test_each_limit_is_set_by_the_option_of_its_name(client: SimpleNamespace) -> None:
    before: dict[str, Any] = {"tenant": "acme", "object": "quota", "period": "month"}
    client.admin.get_tagged.return_value = ({**before, **dict.fromkeys(LIMITS)}, "tag")
    client.admin.put.return_value = before
    options = [f"--{name.replace('_', '-')}={number}" for name, number in LIMITS.items()]
    invoke(quotas.app, "set", "acme", *options, "--period=day")
    ((_, body), kept) = client.admin.put.call_args
    assert body == {**LIMITS, "period": "day"}
    assert kept == {"if_match": "tag"}
