"""The formats of names: tenants, adapters, aliases and others.

Names never form paths or object keys. They are checked so that a model's name can be parsed in one
way only: `[tenant/]adapter[@version|@alias|@sha256:…]`.
"""

from __future__ import annotations

import string

from .errors import InvalidValue

MAX_SLUG_LENGTH = 63
MAX_NAME_LENGTH = 64
LATEST = "latest"
"""The implicit alias of the newest ready version."""

_LOWER_OR_DIGIT = frozenset(string.ascii_lowercase + string.digits)
_SLUG_CHARACTERS = _LOWER_OR_DIGIT | {"-"}
_NAME_CHARACTERS = _LOWER_OR_DIGIT | set("._-")
_DIGITS = frozenset(string.digits)


def is_slug(text: str) -> bool:
    """A tenant's slug: `[a-z0-9][a-z0-9-]{0,62}`."""
    return _is_made_of(text, _SLUG_CHARACTERS, MAX_SLUG_LENGTH)


def is_adapter_name(text: str) -> bool:
    """An adapter's name: `[a-z0-9][a-z0-9._-]{0,63}`, so never `.` or `..`."""
    return _is_made_of(text, _NAME_CHARACTERS, MAX_NAME_LENGTH)


def is_alias_name(text: str) -> bool:
    """An alias: formed like an adapter's name, and not to be read as a version or a digest."""
    reads_otherwise = _DIGITS.issuperset(text) or text.startswith("sha256") or text == LATEST
    return is_adapter_name(text) and not reads_otherwise


def check_slug(text: str, *, param: str = "slug") -> str:
    """Return the slug, or raise InvalidValue."""
    if not is_slug(text):
        raise InvalidValue(
            "A slug has 1 to 63 characters of a-z, 0-9 and '-', and does not begin with '-'.",
            param=param,
        )
    return text


def check_adapter_name(text: str, *, param: str = "name") -> str:
    """Return the adapter's name, or raise InvalidValue."""
    if not is_adapter_name(text):
        raise InvalidValue(
            "An adapter name has 1 to 64 characters of a-z, 0-9, '.', '_' and '-', and "
            "begins with a letter or digit.",
            param=param,
        )
    return text


def check_golden_set_name(text: str, *, param: str = "golden_set") -> str:
    """Return the golden set's name, formed like an adapter's, or raise InvalidValue."""
    if not is_adapter_name(text):
        raise InvalidValue(
            "The name of a golden set has 1 to 64 characters of a-z, 0-9, '.', '_' and '-', and "
            "begins with a letter or digit.",
            param=param,
        )
    return text


def check_operator_name(text: str, *, param: str = "name") -> str:
    """Return the operator's name, formed like an adapter's, or raise InvalidValue."""
    if not is_adapter_name(text):
        raise InvalidValue(
            "An operator name has 1 to 64 characters of a-z, 0-9, '.', '_' and '-', and "
            "begins with a letter or digit.",
            param=param,
        )
    return text


def check_alias_name(text: str, *, param: str = "alias") -> str:
    """Return the alias, or raise InvalidValue."""
    if not is_alias_name(text):
        raise InvalidValue(
            "An alias follows the rules of adapter names, and cannot be a number or 'latest' "
            "or begin with 'sha256'.",
            param=param,
        )
    return text


def _is_made_of(text: str, characters: frozenset[str], max_length: int) -> bool:
    return (
        1 <= len(text) <= max_length and characters.issuperset(text) and text[0] in _LOWER_OR_DIGIT
    )
