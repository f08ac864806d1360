"""Ranks evict the tokens that SnapKV and H2O in plain PyTorch evict, each for its own KV heads."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from random import Random

import pytest

from loraplex.engine.kv_policy import EvictionMethod, KvPolicy
from loraplex.engine.messages import SpeculationParams
from support.engine import MIB, LocalEngine
from support.kv_eviction import EvictingLlama
from support.models import make_tiny_llama
from support.ranks import followers_as_threads

pytestmark = pytest.mark.slow

POLICIES = (
    None,
    KvPolicy(EvictionMethod.SNAPKV, 50),
    KvPolicy(EvictionMethod.H2O, 40),
)
LENGTHS = (106, 81)
"""Of prompts: the second ends one token into a block."""
MAX_TOKENS = 36
"""Enough for two compactions of an output."""
SIZES = (2, 4)
"""With 4 ranks, two hold each of the two KV heads."""


@pytest.mark.parametrize("size", SIZES)
def test_sequences_of_all_policies_share_a_batch(tmp_path: Path, size: int) -> None:
    """Some are swapped out, some verify drafts of the first layer."""
    base = make_tiny_llama(tmp_path / "base", tie_word_embeddings=False)
    rng = Random(0)
    prompts = [[rng.randrange(200) for _ in range(length)] for length in LENGTHS]
    reference = EvictingLlama(base)
    with followers_as_threads() as followers:
        engine = LocalEngine(
            base,
            tmp_path,
            dtype="float32",
            num_threads=1,
            tensor_parallel_size=size,
            max_num_seqs=6,
            max_num_batched_tokens=40,
            max_model_len=160,
            kv_cache_bytes=18 * 16 * 512 // 2,
            swap_bytes=MIB,
            speculation=("early_exit:1",),
        )
        ids = {
            engine.submit(
                prompt,
                kv_policy=policy,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                num_logprobs=0,
                speculation=SpeculationParams("early_exit", 4),
            ): (prompt, policy)
            for prompt, policy in product(prompts, POLICIES)
        }
        engine.run()
        assert engine.core.stats().num_swaps > 0
        engine.generate([1, 2, 3])
        assert [len(follower.steps.masses) for follower in followers] == [0] * (size - 1)
        engine.close()
    assert any(answer.end.num_draft_tokens for answer in engine.answers.values())
    for request_id, (prompt, policy) in ids.items():
        answer, expected = (
            engine.answers[request_id],
            reference.generate(prompt, MAX_TOKENS, policy),
        )
        assert answer.end.error is None
        assert answer.token_ids == expected.token_ids
        found = [entry.chosen.logprob for entry in answer.logprobs]
        assert found == pytest.approx(expected.logprobs, abs=1e-4)
