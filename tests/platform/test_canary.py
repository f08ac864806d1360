"""The canary's requests: a fixed share, always the same ones."""

from __future__ import annotations

import hashlib
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.platform.adapters.canary import Canary, check_canary, is_in_canary, request_place
from loraplex.platform.errors import InvalidValue

NUM_REQUESTS = 20_000
MAX_DEVIATIONS = 4.5
"""In standard deviations: one of 150,000 fair hashes would exceed it."""


def places(adapter_id: str = "adapter", alias: str = "prod") -> list[float]:
    return [request_place(adapter_id, alias, f"request-{n}") for n in range(NUM_REQUESTS)]


def reference_place(adapter_id: str, alias: str, request_id: str) -> float:
    """The definition, written another way."""
    message = b""
    for text in ("adapter", adapter_id, "alias", alias, "request", request_id):
        message += struct.pack("<Q", len(text.encode())) + text.encode()
    digest = hashlib.blake2b(message, digest_size=8, person=b"loraplex canary").digest()
    (number,) = struct.unpack("<Q", digest)
    return float(number // 2**11) / 2**53 * 100


def binomial_bound(percent: float, num: int = NUM_REQUESTS) -> float:
    """How far the number of hits may lie from its mean."""
    share = percent / 100
    return MAX_DEVIATIONS * math.sqrt(num * share * (1 - share))


@pytest.mark.parametrize("percent", [0.1, 1, 5, 12.5, 50, 90, 99.9])
def test_the_canary_gets_its_share(percent: float) -> None:
    hits = sum(
        is_in_canary(percent, adapter_id="adapter", alias="prod", request_id=f"request-{n}")
        for n in range(NUM_REQUESTS)
    )
    assert abs(hits - NUM_REQUESTS * percent / 100) <= binomial_bound(percent)


def test_requests_are_spread_evenly() -> None:
    per_bin = [0] * 20
    for place in places():
        per_bin[int(place // 5)] += 1
    assert max(abs(n - NUM_REQUESTS / 20) for n in per_bin) <= binomial_bound(5)


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_the_place_is_the_one_that_was_published(adapter: str, alias: str, request: str) -> None:
    place = request_place(adapter, alias, request)
    assert 0 <= place < 100
    assert place == reference_place(adapter, alias, request)


@given(st.text(max_size=20), *[st.floats(0.001, 99.999)] * 2)
def test_a_growing_canary_keeps_its_requests(request: str, first: float, second: float) -> None:
    smaller, larger = sorted((first, second))

    def is_in(percent: float) -> bool:
        return is_in_canary(percent, adapter_id="adapter", alias="prod", request_id=request)

    assert is_in(larger) or not is_in(smaller)


@pytest.mark.parametrize("other", [("adapter", "eu"), ("adapter 2", "prod")])
def test_one_canary_says_nothing_of_another(other: tuple[str, str]) -> None:
    both = sum(a < 50 and b < 50 for a, b in zip(places(), places(*other), strict=True))
    assert abs(both - NUM_REQUESTS / 4) <= binomial_bound(25)


def test_fields_do_not_run_into_each_other() -> None:
    assert request_place("ab", "c", "d") != request_place("a", "bc", "d")
    assert request_place("a", "b", "cd") != request_place("a", "bc", "d")


@pytest.mark.parametrize("percent", [0.0, -1.0, 100.0, 101.0, math.nan, math.inf, -math.inf])
def test_refuses_percents_that_split_nothing(percent: float) -> None:
    with pytest.raises(InvalidValue) as caught:
        check_canary(Canary(2, percent), 1)
    assert caught.value.param == "canary.percent"


def test_refuses_the_main_version_as_its_own_canary() -> None:
    with pytest.raises(InvalidValue) as caught:
        check_canary(Canary(1, 10), 1)
    assert caught.value.param == "canary.version"
    assert check_canary(Canary(2, 10), 1) == Canary(2, 10)
