"""Names of adapters and aliases, and `NAME[@VERSION]`.

A name contains no slash, so a path is never mistaken for a name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...platform.names import LATEST, is_adapter_name, is_alias_name
from .api_client import ApiClient, api_path
from .errors import InvalidArgument, NotFound

LIVE = "prod"
"""The alias that a bare name means."""
MAX_VERSION_DIGITS = 9


class Reference(NamedTuple):
    """An adapter, and which version of it: a number, an alias, or None for what its name means."""

    name: str
    version: int | str | None


def check_name(name: str) -> str:
    """The adapter's name. Raises InvalidArgument."""
    if not is_adapter_name(name):
        raise InvalidArgument(
            f"{name!r} is not an adapter name. Use the plain name, such as support-bot, "
            "without tenant/ or @version: a-z, 0-9, '.', '_' and '-', at most 64 of them.",
        )
    return name


def check_alias(alias: str) -> str:
    """The alias. Raises InvalidArgument."""
    if not is_alias_name(alias):
        raise InvalidArgument(
            f"{alias!r} is not an alias. Use a name such as prod; a number means a version.",
        )
    return alias


def parse_reference(text: str) -> Reference:
    """Take `NAME[@VERSION]` apart. Raises InvalidArgument."""
    name, has_version, version = text.partition("@")
    if not is_adapter_name(name):
        raise _no_reference(text)
    if not has_version:
        return Reference(name, None)
    if version.isascii() and version.isdecimal() and not version.startswith("0"):
        if len(version) <= MAX_VERSION_DIGITS:
            return Reference(name, int(version))
        raise _no_reference(text)
    if version != LATEST and not is_alias_name(version):
        raise _no_reference(text)
    return Reference(name, version)


def find_number(client: ApiClient, reference: Reference) -> int:
    """The number of the version that the reference currently resolves to. Raises NotFound if there
    is none."""
    name, version = reference
    if isinstance(version, int):
        return version
    adapter = client.get(api_path("adapters", name))
    number: int | None = adapter["aliases"].get(LIVE if version is None else version)
    if number is None and version in (None, LATEST):
        number = _newest(adapter["versions"])
    if number is None:
        raise NotFound(f"{name!r} has no alias {version!r}.")
    return number


def version_path(client: ApiClient, reference: Reference, *parts: str) -> str:
    """The API path of the version that the reference currently resolves to, with `parts` below
    it."""
    number = find_number(client, reference)
    return api_path("adapters", reference.name, "versions", number, *parts)


def _newest(versions: list[dict[str, Any]]) -> int | None:
    """The newest ready version; if none is ready, the newest, whose state explains why."""
    ready = [entry["version"] for entry in versions if entry["state"] == "ready"]
    return max(ready or [entry["version"] for entry in versions], default=None)


def _no_reference(text: str) -> InvalidArgument:
    return InvalidArgument(
        f"{text!r} is not a version. Use NAME or NAME@VERSION, such as support-bot, "
        "support-bot@3 or support-bot@prod; a path begins with ./ or /.",
    )
