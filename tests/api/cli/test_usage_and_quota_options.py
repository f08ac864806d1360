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

from loraplex.api.cli import budgets, prices, quotas, usage
from loraplex.api.cli.exit_codes import CommandFailed

LIMITS = {
    "requests_per_minute": 1,
    "input_tokens_per_minute": 2,
    "output_tokens_per_minute": 3,
    "concurrent_requests": 4,
    "tokens_per_period": 5,
    "trained_tokens_per_period": 11,
    "adapters": 6,
    "versions_per_adapter": 7,
    "stored_bytes": 8,
    "keys": 9,
    "users": 10,
}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Notes what the commands ask for."""
    found = Mock()
    found.pages.return_value = []
    found.admin.pages.return_value = []

    @contextmanager
    def opened() -> Iterator[SimpleNamespace]:
        yield found

    for command in (usage, quotas, prices, budgets):
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


def test_limits_of_a_key_keep_those_that_are_not_named(client: SimpleNamespace) -> None:
    names = ["requests_per_minute", "input_tokens_per_minute", "output_tokens_per_minute"]
    before = {**dict.fromkeys(names, 3), "concurrent_requests": 4}
    client.get.return_value = {**before, "object": "limits"}
    client.put.return_value = before
    invoke(quotas.app, "set-caller", "--of-key=k", "--requests-per-minute=none")
    client.put.assert_called_once_with("/keys/k/limits", {**before, "requests_per_minute": None})


def test_a_price_is_set_by_the_options_of_its_parts(client: SimpleNamespace) -> None:
    client.admin.post.return_value = dict.fromkeys(prices.COLUMNS)
    options = ["--currency=EUR", "--prompt-tokens=0.15", "--completion-tokens=0.6"]
    more = ["--cached-tokens=0.04", "--trained-tokens=3", "--batch-discount=50"]
    more += ["--base=tiny", "--only-for=acme"]
    invoke(prices.app, "set", *options, *more, "--since=2026-12-01T00:00:00Z")
    client.admin.post.assert_called_once_with(
        "/prices",
        {
            "base": "tiny",
            "tenant": "acme",
            "currency": "EUR",
            "prompt_tokens": "0.15",
            "cached_tokens": "0.04",
            "completion_tokens": "0.6",
            "trained_tokens": "3",
            "batch_discount": 50,
            "effective_from": "2026-12-01T00:00:00+00:00",
        },
    )


def test_a_tenants_own_price_is_ended_at_a_time(client: SimpleNamespace) -> None:
    client.admin.post.return_value = dict.fromkeys(prices.COLUMNS)
    invoke(prices.app, "end", "--only-for=acme", "--base=tiny", "--since=2026-12-01T00:00:00Z")
    end = {"tenant": "acme", "base": "tiny", "effective_from": "2026-12-01T00:00:00+00:00"}
    client.admin.post.assert_called_once_with("/prices/end", end)


def test_prices_are_listed_by_base_and_tenant(client: SimpleNamespace) -> None:
    invoke(prices.app, "list", "--base=tiny", "--only-for=acme", "--current")
    client.admin.pages.assert_called_once_with("/prices", base="tiny", tenant="acme", current=True)


@pytest.mark.parametrize(
    ("option", "path"),
    [
        ("--of-tenant=acme", "/tenants/acme/budgets/day"),
        ("--of-key=k", "/keys/k/budgets/day"),
        ("--of-user=u", "/users/u/budgets/day"),
    ],
)
def test_a_budget_is_set_and_removed_where_it_belongs(
    client: SimpleNamespace, option: str, path: str
) -> None:
    asked = client.admin if "tenant" in option else client
    asked.put.return_value = dict.fromkeys(budgets.COLUMNS)
    invoke(budgets.app, "set", "250.00", option, "--period=day", "--alert-percent=90")
    asked.put.assert_called_once_with(path, {"amount": "250.00", "alert_percents": [90]})
    invoke(budgets.app, "remove", option, "--period=day")
    asked.delete.assert_called_once_with(path)


@pytest.mark.parametrize("options", [[], ["--of-key=k", "--of-user=u"]])
def test_a_budget_of_nobody_or_of_two_is_a_mistake(
    client: SimpleNamespace, options: list[str]
) -> None:
    result = CliRunner().invoke(budgets.app, ["set", "1", *options])
    assert isinstance(result.exception, CommandFailed)
