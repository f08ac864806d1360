"""How the name of a composition is read."""

from __future__ import annotations

import pytest

from loraplex.platform.adapters.composition_names import (
    MAX_PINNED_LENGTH,
    NamedMember,
    check_members,
    parse_members,
)
from loraplex.platform.errors import InvalidComposition, ModelNotFound
from loraplex.platform.names import MAX_NAME_LENGTH, MAX_SLUG_LENGTH, is_adapter_name, is_slug

A, B = "a@sha256:123456789012", "b@sha256:abcdef123456"


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("sql", [("sql", 1.0)]),
        ("sql+polite:0.5", [("sql", 1.0), ("polite", 0.5)]),
        ("acme/sql@3:-2+polite@prod:.25", [("acme/sql@3", -2.0), ("polite@prod", 0.25)]),
        (f"{A}+{B}:1.5", [(A, 1.0), (B, 1.5)]),
        ("a:0+b:00.50", [("a", 0.0), ("b", 0.5)]),
        ("a:7", [("a", 7.0)]),
        ("+a", [("", 1.0), ("a", 1.0)]),
    ],
)
def test_each_adapter_has_its_name_and_its_weight(
    text: str, members: list[tuple[str, float]]
) -> None:
    assert parse_members(text) == members


@pytest.mark.parametrize(
    "weight", ["", "x", "nan", "-inf", "1e0", "1_0", " 1", "--1", "1.2.3", "１", "0x1", "0" * 25]
)
def test_a_weight_is_a_short_decimal_number(weight: str) -> None:
    with pytest.raises(ModelNotFound):
        parse_members(f"a:{weight}+b")


def test_no_name_of_an_adapter_or_tenant_reads_as_a_composition() -> None:
    for character in "+:":
        assert not is_adapter_name(f"a{character}b")
        assert not is_slug(f"a{character}b")


@pytest.mark.parametrize("weight", [2.01, -2.01, float("inf"), float("nan")])
def test_weights_are_finite_and_from_minus_2_to_2(weight: float) -> None:
    with pytest.raises(InvalidComposition):
        check_members([NamedMember("a"), NamedMember("b", weight)])


def test_four_adapters_are_composed_and_no_more() -> None:
    check_members([NamedMember(str(number), 2.0) for number in range(4)])
    with pytest.raises(InvalidComposition):
        check_members([NamedMember(str(number)) for number in range(5)])


def test_the_longest_pinned_name_is_within_its_bound() -> None:
    weight = -1.2345678901234567
    member = f"{'t' * MAX_SLUG_LENGTH}/{'a' * MAX_NAME_LENGTH}@{10**9 - 1}:{weight!r}"
    assert len("+".join([member] * 4)) <= MAX_PINNED_LENGTH
