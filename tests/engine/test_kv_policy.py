"""Policies as text, and when they compact a cache."""

from __future__ import annotations

import pytest

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.kv.eviction import NEVER, EvictionPlan, plan_eviction
from loraplex.engine.kv_policy import EvictionMethod, KvPolicy, parse_kv_policy

SNAPKV, H2O = EvictionMethod.SNAPKV, EvictionMethod.H2O


def test_a_policy_is_a_method_and_a_budget() -> None:
    assert parse_kv_policy("snapkv:1024") == KvPolicy(SNAPKV, 1024)
    assert EngineConfig("base", kv_policy="h2o:2").default_kv_policy == KvPolicy(H2O, 2)


@pytest.mark.parametrize("text", ["", "lru:64", "h2o", "h2o:", "h2o:-4", "h2o:1.5", "snapkv:32"])
def test_other_texts_are_refused_at_the_start(text: str) -> None:
    with pytest.raises(InvalidParameter, match="kv_policy"):
        EngineConfig("base", kv_policy=text)


def points(method: EvictionMethod, num_prompt_tokens: int, end: int) -> list[int]:
    """Where a sequence with a budget of 40 is compacted, up to `end` tokens."""
    plan = EvictionPlan(method, 40, num_prompt_tokens, 16)
    found, point = [], plan.next_after(0)
    while point <= end:
        found.append(point)
        assert {plan.next_after(each) for each in range(found[-2] if found[1:] else 0, point)} == {
            point
        }
        point = plan.next_after(point)
    return found


def test_snapkv_compacts_once_and_h2o_after_each_block() -> None:
    assert points(SNAPKV, 90, 200) == [90]
    assert points(H2O, 90, 140) == [90, 106, 122, 138]
    assert points(H2O, 41, 80) == [41, 57, 73]
    assert points(H2O, 40, 90) == [56, 72, 88]
    assert points(H2O, 3, 60) == [56]


@pytest.mark.parametrize(
    ("policy", "num_prompt_tokens", "max_num_tokens"),
    [
        (None, 500, 600),
        (KvPolicy(SNAPKV, 100), 100, 600),
        (KvPolicy(SNAPKV, 100), 500, 500),
        (KvPolicy(H2O, 100), 3, 116),
    ],
)
def test_a_sequence_that_is_never_compacted_has_no_plan(
    policy: KvPolicy | None, num_prompt_tokens: int, max_num_tokens: int
) -> None:
    plan = plan_eviction(
        policy,
        num_prompt_tokens=num_prompt_tokens,
        max_num_tokens=max_num_tokens,
        block_size=16,
    )
    assert plan is None


@pytest.mark.parametrize("method", EvictionMethod)
@pytest.mark.parametrize("num_prompt_tokens", [3, 41, 90, 96])
def test_the_peak_of_blocks_is_that_of_the_steps_on_the_way(
    method: EvictionMethod, num_prompt_tokens: int
) -> None:
    plan = EvictionPlan(method, 40, num_prompt_tokens, 16)
    held = peak = num_evicted = 0
    for num_tokens in range(1, 200):
        held = max(held, -(-(num_tokens - num_evicted) // 16))
        is_point = num_tokens == plan.next_after(num_tokens - 1)
        peak = max(peak, held + plan.num_target_blocks * is_point)
        if is_point:
            held, num_evicted = plan.num_target_blocks, num_tokens - 40
        found = plan.num_blocks(0, 0, num_tokens)
        assert found == peak
    assert plan.first < NEVER
