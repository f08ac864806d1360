"""Served tokens under KV eviction equal those of SnapKV and H2O in plain PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from loraplex.engine.config import EngineConfig, KvDtype
from loraplex.engine.core import EngineCore
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.execution import evictions
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.kv_policy import EvictionMethod, KvPolicy
from loraplex.engine.messages import SpeculationParams
from loraplex.engine.parts import open_parts
from loraplex.kernels.kv_eviction import move_tokens
from support.engine import LocalEngine
from support.families import SERVED, save_family
from support.kv_eviction import EvictingLlama, Generated
from support.marks import marked_slow
from support.medusa import save_untrained_heads
from support.models import make_tiny_llama

MIB = 1 << 20
BLOCK_SIZE = 16
TOLERANCE = 1e-4
ONE_CODE = 2e-3
"""What a log probability changes by where an entry lies between two int8 codes, and rounding in
another order of summation takes the other one."""
SNAPKV = KvPolicy(EvictionMethod.SNAPKV, 50)
H2O = KvPolicy(EvictionMethod.H2O, 40)
POLICIES = (None, SNAPKV, H2O)
WHEN = ("in the prompt", "in the output")
PROPOSERS = {
    "ngram": "ngram",
    "early_exit": "early_exit:1",
    "early_exit_tree": "early_exit_tree:1",
    "draft": "draft:{base}",
    "medusa": "medusa:{heads}",
    "medusa_tree": "medusa_tree:{heads}",
    "quantized": "quantized:int8",
}
"""What the engine's configuration says."""
LENGTHS = (106, 81)
"""Of prompts: the second ends one token into a block."""
MAX_TOKENS = 36
"""Enough for two compactions of an output."""


@dataclass
class World:
    base: Path
    root: Path
    prompts: list[list[int]]
    expected: dict[tuple[int, KvPolicy | None], Generated]
    """By the prompt's index and the policy."""

    def engine(self, **config: object) -> LocalEngine:
        return LocalEngine(self.base, self.root, dtype="float32", **config)

    def submit(
        self, engine: LocalEngine, index: int, policy: KvPolicy | None, **request: Any
    ) -> str:
        return engine.submit(
            self.prompts[index],
            kv_policy=policy,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            num_logprobs=0,
            **request,
        )

    def check(
        self, engine: LocalEngine, request_id: str, index: int, policy: KvPolicy | None
    ) -> None:
        check(engine, request_id, self.expected[index, policy])


def check(
    engine: LocalEngine, request_id: str, expected: Generated, tolerance: float = TOLERANCE
) -> None:
    answer = engine.answers[request_id]
    assert answer.end.error is None
    assert answer.token_ids == expected.token_ids
    found = [entry.chosen.logprob for entry in answer.logprobs]
    assert found == pytest.approx(expected.logprobs, abs=tolerance)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("eviction")
    base = make_tiny_llama(root / "base", tie_word_embeddings=False)
    rng = Random(0)
    prompts = [[rng.randrange(200) for _ in range(length)] for length in LENGTHS]
    reference = EvictingLlama(base)
    expected = {
        (index, policy): reference.generate(prompt, MAX_TOKENS, policy)
        for index, prompt in enumerate(prompts)
        for policy in POLICIES
    }
    return World(base, root, prompts, expected)


@pytest.fixture
def engine(world: World) -> Iterator[LocalEngine]:
    engine = world.engine()
    yield engine
    engine.close()


def test_policies_change_the_answers(world: World) -> None:
    for index in range(len(LENGTHS)):
        answers = {tuple(world.expected[index, policy].token_ids) for policy in POLICIES}
        assert len(answers) == len(POLICIES), "or the comparisons below would show nothing"


STEPS = list(product([9, 40, 1024], [False, True]))
"""The tokens of a step, and whether the next one is scheduled meanwhile."""


@pytest.mark.parametrize("step", marked_slow(STEPS, slow=set(STEPS) - {(9, False), (40, True)}))
def test_sequences_of_all_policies_share_a_batch(world: World, step: tuple[int, bool]) -> None:
    """With 9 tokens a step, the window of a prompt is computed in many steps."""
    engine = world.engine(
        max_num_seqs=8,
        max_num_batched_tokens=step[0],
        async_scheduling=step[1],
        prefix_caching=False,
    )
    cases = list(world.expected)
    ids = [world.submit(engine, *case) for case in cases]
    engine.run()
    for request_id, case in zip(ids, cases, strict=True):
        world.check(engine, request_id, *case)
    engine.close()


@pytest.mark.parametrize("policy", [SNAPKV, H2O])
def test_compaction_gives_blocks_back(world: World, engine: LocalEngine, policy: KvPolicy) -> None:
    pool = engine.core.parts.kv.groups[0].pool
    request_id = world.submit(engine, 0, policy)
    num_cached = world.expected[0, policy].num_cached
    while not (tokens := engine.answers[request_id].token_ids):
        engine.step()
    while len(tokens) < MAX_TOKENS - 1:
        num_tokens = num_cached[len(tokens) - 1]
        held = pool.num_usable - pool.num_free
        assert -(-num_tokens // BLOCK_SIZE) <= held <= num_tokens // BLOCK_SIZE + 1
        engine.step()
    engine.run()
    assert pool.num_free == pool.num_usable
    engine.core.parts.kv.check_integrity([])


def test_snapkv_reads_the_prefix_before_its_window(world: World, engine: LocalEngine) -> None:
    first = world.submit(engine, 0, SNAPKV)
    engine.run()
    second = world.submit(engine, 0, SNAPKV)
    engine.run()
    started = engine.answers[second].started
    assert started is not None
    assert started.num_cached_tokens == (LENGTHS[0] - 32) // BLOCK_SIZE * BLOCK_SIZE
    for request_id in (first, second):
        world.check(engine, request_id, 0, SNAPKV)


def test_h2o_reads_no_prefix(world: World, engine: LocalEngine) -> None:
    """What its cached tokens received from each other would be unknown."""
    for _ in range(2):
        request_id = world.submit(engine, 0, H2O)
        engine.run()
        started = engine.answers[request_id].started
        assert started is not None
        assert started.num_cached_tokens == 0
        world.check(engine, request_id, 0, H2O)


@pytest.mark.parametrize("policy", marked_slow([SNAPKV, H2O], slow=[SNAPKV]))
def test_the_cached_prompt_of_a_compacted_sequence_stays_whole(
    world: World, engine: LocalEngine, policy: KvPolicy
) -> None:
    compacted = world.submit(engine, 0, policy)
    while not engine.answers[compacted].token_ids:
        engine.step()
    whole = world.submit(engine, 0, None)
    engine.run()
    started = engine.answers[whole].started
    assert started is not None
    assert started.num_cached_tokens == LENGTHS[0] // BLOCK_SIZE * BLOCK_SIZE
    world.check(engine, whole, 0, None)
    world.check(engine, compacted, 0, policy)


def test_the_output_of_a_compacted_sequence_is_no_prefix(world: World, engine: LocalEngine) -> None:
    request_id = world.submit(engine, 0, SNAPKV)
    engine.run()
    longer = engine.submit([*world.prompts[0], *engine.answers[request_id].token_ids, 5])
    engine.run()
    started = engine.answers[longer].started
    assert started is not None
    assert started.num_cached_tokens == LENGTHS[0] // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("policy", marked_slow([SNAPKV, H2O], slow=[SNAPKV]))
def test_the_choices_of_a_request_are_compacted_each_for_itself(
    world: World, engine: LocalEngine, policy: KvPolicy
) -> None:
    ids = [world.submit(engine, 0, policy, group_id="g") for _ in range(3)]
    engine.run()
    for request_id in ids:
        world.check(engine, request_id, 0, policy)
    num_cached = [each.num_cached_tokens for i in ids if (each := engine.answers[i].started)]
    assert num_cached == ([0, 64, 64] if policy is SNAPKV else [0, 0, 0])


SHORTAGES = {80: 1, 114: 2, 120: 2, 121: 2, 130: 2}
"""Numbers of computed tokens at which a sequence finds no block: in the window of a prompt of 106,
before a compaction of an output, and where one of its blocks is full. A decoding one asks twice."""


@pytest.mark.parametrize("swap_bytes", marked_slow([0, 4 * MIB], slow={0}))
@pytest.mark.parametrize("policy", [SNAPKV, H2O])
def test_a_preempted_sequence_goes_on_with_what_it_kept(
    world: World, policy: KvPolicy, swap_bytes: int
) -> None:
    engine = world.engine(max_num_seqs=4, max_num_batched_tokens=40, swap_bytes=swap_bytes)
    scheduler, kv = engine.core.parts.scheduler, engine.core.parts.kv
    grow, shortages = kv.grow, Counter(SHORTAGES)

    def grow_or_be_short(seq: SequenceBlocks, num_computed: int, num_tokens: int) -> bool:
        if not shortages[num_computed]:
            return grow(seq, num_computed, num_tokens)
        shortages[num_computed] -= 1
        return False

    kv.grow = grow_or_be_short  # type: ignore[method-assign]
    request_id = world.submit(engine, 0, policy)
    engine.run()
    assert scheduler.num_preemptions >= 2
    assert bool(scheduler.num_swaps) == bool(swap_bytes)
    world.check(engine, request_id, 0, policy)
    kv.check_integrity([])
    engine.close()


@pytest.mark.slow
def test_a_crowd_shares_a_pool_that_is_too_small(world: World) -> None:
    """Room for the largest sequence and its compaction, and a few blocks more."""
    engine = world.engine(
        max_num_seqs=6,
        max_num_batched_tokens=60,
        max_model_len=160,
        kv_cache_bytes=14 * BLOCK_SIZE * 512,
        swap_bytes=MIB,
    )
    cases = list(world.expected) * 2
    ids = [world.submit(engine, *case) for case in cases]
    engine.run()
    assert engine.core.parts.scheduler.num_preemptions > 0
    for request_id, case in zip(ids, cases, strict=True):
        world.check(engine, request_id, *case)
    engine.core.parts.kv.check_integrity([])
    engine.close()


@pytest.mark.parametrize("policy", [SNAPKV, H2O])
@pytest.mark.parametrize("when", marked_slow(WHEN, slow=WHEN[:1]))
def test_an_aborted_sequence_leaves_no_blocks(world: World, policy: KvPolicy, when: str) -> None:
    engine = world.engine(max_num_seqs=4, max_num_batched_tokens=40)
    request_id = world.submit(engine, 0, policy)
    engine.step()
    while when == "in the output" and len(engine.answers[request_id].token_ids) < 20:
        engine.step()
    engine.abort(request_id)
    engine.run()
    pool = engine.core.parts.kv.groups[0].pool
    assert pool.num_free == pool.num_usable
    engine.close()


def test_a_step_that_fails_in_its_middle_compacts_once_it_runs_again(
    world: World, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [3]

    def fail_once(*arguments: object) -> None:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("planted")
        move_tokens(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(evictions, "move_tokens", fail_once)
    ids = [world.submit(engine, 0, policy) for policy in (SNAPKV, H2O)]
    engine.run()
    for request_id, policy in zip(ids, (SNAPKV, H2O), strict=True):
        world.check(engine, request_id, 0, policy)


@pytest.mark.parametrize("proposer", marked_slow(PROPOSERS, slow=PROPOSERS.keys() - {"early_exit"}))
def test_draft_tokens_are_verified_over_a_compressed_prompt(
    world: World, proposer: str, tmp_path: Path
) -> None:
    if proposer.startswith("medusa"):
        save_untrained_heads(world.base, tmp_path)
    configured = PROPOSERS[proposer].format(base=world.base, heads=tmp_path)
    engine = world.engine(speculation=(configured,))
    asked = SpeculationParams(proposer, 4)
    ids = [world.submit(engine, index, SNAPKV, speculation=asked) for index in (0, 1)]
    engine.run()
    for index, request_id in enumerate(ids):
        world.check(engine, request_id, index, SNAPKV)
    assert any(engine.answers[request_id].end.num_draft_tokens for request_id in ids)
    engine.close()


def test_h2o_verifies_no_draft_tokens(world: World) -> None:
    engine = world.engine(speculation=("early_exit:1",))
    asked = SpeculationParams("early_exit", 4)
    request_id = world.submit(engine, 0, H2O, speculation=asked)
    engine.run()
    world.check(engine, request_id, 0, H2O)
    assert engine.answers[request_id].end.num_draft_tokens == 0
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("policy", [SNAPKV, H2O])
def test_quantized_entries_are_kept_as_they_are(world: World, policy: KvPolicy) -> None:
    reference = EvictingLlama(world.base, has_int8_cache=True)
    expected = reference.generate(world.prompts[1], MAX_TOKENS, policy)
    engine = world.engine(kv_dtype="int8")
    request_id = world.submit(engine, 1, policy)
    engine.run()
    check(engine, request_id, expected, ONE_CODE)
    engine.close()


def test_a_prompt_within_the_budget_keeps_all_its_tokens(world: World, engine: LocalEngine) -> None:
    for policy in (KvPolicy(EvictionMethod.SNAPKV, LENGTHS[0]), KvPolicy(EvictionMethod.H2O, 400)):
        request_id = world.submit(engine, 0, policy)
        engine.run()
        world.check(engine, request_id, 0, None)
    started = engine.answers[request_id].started
    assert started is not None
    assert started.num_cached_tokens > 0, "prefixes are reused as without a policy"


def test_the_server_s_policy_applies_to_requests_without_their_own(world: World) -> None:
    engine = world.engine(kv_policy="snapkv:50")
    for policy, expected in ((None, SNAPKV), (H2O, H2O)):
        request_id = world.submit(engine, 0, policy)
        engine.run()
        world.check(engine, request_id, 0, expected)
    engine.close()


UNSUPPORTED = [
    ("llama", {"kv_dtype": "int4"}, "int4"),
    ("llama", {"attention_window": 64}, "windows"),
    ("mistral-window", {}, "windows"),
    ("deepseek_v2-mla", {}, "latent"),
    ("bloom-slopes", {}, "ALiBi"),
]


@pytest.mark.parametrize(("family", "config", "reason"), UNSUPPORTED)
def test_other_caches_refuse_policies(
    tmp_path: Path, family: str, config: dict[str, object], reason: str
) -> None:
    base = save_family(tmp_path / "base", *SERVED[family])
    engine = LocalEngine(base, tmp_path, kv_cache_bytes=16 * MIB, **config)
    refused = engine.submit([5, 6, 7], kv_policy=SNAPKV)
    served = engine.submit([5, 6, 7])
    engine.run()
    error = engine.answers[refused].end.error
    assert error is not None
    assert error.code == "kv_policy_not_served"
    assert reason in error.message
    assert engine.answers[served].end.error is None
    engine.close()


def test_a_server_policy_that_the_cache_refuses_ends_the_start(world: World) -> None:
    config = EngineConfig(
        str(world.base),
        device="cpu",
        kv_dtype=KvDtype.INT4,
        kv_policy="h2o:64",
        kv_cache_bytes=16 * MIB,
    )
    with pytest.raises(InvalidParameter, match="kv_policy: not supported with --kv-dtype int4"):
        EngineCore(open_parts(config))
