"""Who computes a prompt for a group, and who waits for it."""

from __future__ import annotations

import pytest

from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.messages import GenerationRequest, Pooling
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.groups import Groups


def make_request(
    num_tokens: int = 5,
    *,
    group: str | None = "g",
    tenant: str = "acme",
    num_prompt_logprobs: int | None = None,
    pooling: Pooling | None = None,
) -> Request:
    submitted = GenerationRequest(
        "r",
        tenant,
        list(range(num_tokens)),
        SamplingParams(max_tokens=0),
        None,
        group_id=group,
        num_prompt_logprobs=num_prompt_logprobs,
        pooling=pooling,
    )
    request = Request(submitted, CacheNamespace(tenant, "runtime", None), 0, 0.0, None)
    request.kv = SequenceBlocks.empty(1)
    return request


def seen_by(request: Request, other: Request, *, is_running: bool = True) -> tuple[bool, bool]:
    """Whether the request waits for the other, and whether it can go on from it."""
    groups = Groups({other} if is_running else set())
    for member in (request, other):
        groups.add(member)
    parent = groups.parent(request)
    assert parent in (None, other)
    return groups.awaits_prompt(request), parent is other


@pytest.mark.parametrize(
    ("num_tokens", "num_computed", "waits", "goes_on"),
    [
        (5, 0, True, False),
        (5, 3, True, False),
        (5, 4, False, True),
        (5, 9, False, True),
        (2, 0, True, False),
        (2, 1, False, True),
        (1, 0, False, False),
        (1, 1, False, True),
    ],
)
def test_a_prompt_is_waited_for_up_to_its_last_token(
    num_tokens: int, num_computed: int, waits: bool, goes_on: bool
) -> None:
    request, other = make_request(num_tokens), make_request(num_tokens)
    other.num_computed_tokens = num_computed
    assert seen_by(request, other) == (waits, goes_on)
    assert seen_by(request, other, is_running=False) == (False, False)


@pytest.mark.parametrize(
    ("request_", "goes_on"),
    [
        (make_request(pooling=Pooling.LAST), True),
        (make_request(pooling=Pooling.MEAN), False),
        (make_request(num_prompt_logprobs=0), False),
        (make_request(group=None), False),
        (make_request(group="h"), False),
        (make_request(tenant="globex"), False),
        (make_request(4), False),
    ],
)
def test_only_who_need_not_read_the_same_prompt_of_its_group_goes_on_from_another(
    request_: Request, goes_on: bool
) -> None:
    other = make_request()
    other.num_computed_tokens = 5
    assert seen_by(request_, other) == (False, goes_on)


def test_who_has_left_a_group_is_forgotten() -> None:
    request, other, alone = make_request(), make_request(), make_request(group=None)
    groups = Groups({other})
    for member in (request, other, alone):
        groups.add(member)
    groups.remove(other)
    groups.remove(other)
    groups.remove(alone)
    assert not groups.awaits_prompt(request)
    groups.remove(request)
    assert groups._members == {}
