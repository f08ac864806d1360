"""The allowed names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loraplex.platform.errors import InvalidValue
from loraplex.platform.names import check_adapter_name, check_alias_name, check_slug

ALWAYS_REFUSED = [
    "",
    ".",
    "..",
    "-a",
    "_a",
    ".a",
    "A",
    "a b",
    "a/b",
    "a@b",
    "a:b",
    "a\n",
    "é",
    "٣",  # a digit to str.isdigit
    "a\x00",
    "<script>",
    "a" * 65,
]
REFUSED_SLUGS = [*ALWAYS_REFUSED, "a.b", "a_b", "a" * 64]
REFUSED_ALIASES = [*ALWAYS_REFUSED, "3", "007", "sha256", "sha256-x", "latest"]


@pytest.mark.parametrize(
    ("check", "name"),
    [
        *((check_slug, name) for name in ("a", "0", "acme", "acme-2", "a-", "a" * 63)),
        *((check_adapter_name, name) for name in ("a", "7", "sql.v2_x-1", "latest", "a" * 64)),
        *((check_alias_name, name) for name in ("prod", "v3", "3rd", "a" * 64)),
    ],
)
def test_accepts(check: Callable[[str], str], name: str) -> None:
    assert check(name) == name


@pytest.mark.parametrize(
    ("check", "name"),
    [
        *((check_slug, name) for name in REFUSED_SLUGS),
        *((check_adapter_name, name) for name in ALWAYS_REFUSED),
        *((check_alias_name, name) for name in REFUSED_ALIASES),
    ],
)
def test_refuses(check: Callable[[str], str], name: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        check(name)
    assert caught.value.param
