"""The whole engine with each form of KV memory: windows, swap space, sinks, quantization."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from loraplex.engine.config import KvDtype
from loraplex.engine.scheduling.step_costs import StepCosts
from support.engine import LocalEngine
from support.families import SERVED, VOCAB_SIZE, save_family
from support.greedy import assert_greedy, load_dense

BLOCK_SIZE = 4
LAYER_BLOCK_BYTES = BLOCK_SIZE * 2 * 2 * 16 * 4
"""Of one layer: keys and values, two heads of 16 elements, in fp32."""
NUM_LAYERS = 2
WINDOW, SINKS = 24, 4


@pytest.mark.parametrize("swap_bytes", [0, 1 << 20], ids=["recompute", "swap"])
@pytest.mark.parametrize(
    ("case", "num_blocks"),
    [
        ("gemma2-softcap-window", 30),
        ("mistral-window", 12),
        pytest.param("llama", 40, marks=pytest.mark.slow),
    ],
)
def test_crowded_sequences_answer_as_the_models_own_forward(
    case: str,
    num_blocks: int,
    swap_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StepCosts, "swap_seconds", lambda *_: 0.0)  # whatever was measured
    path = save_family(tmp_path / "model", *SERVED[case])
    engine = LocalEngine(
        path,
        tmp_path,
        kv_block_size=BLOCK_SIZE,
        kv_cache_bytes=num_blocks * NUM_LAYERS * LAYER_BLOCK_BYTES,
        swap_bytes=swap_bytes,
        max_model_len=100,
        max_num_seqs=12,
        max_num_batched_tokens=24,
    )
    rng = random.Random(0)
    system = [rng.randrange(VOCAB_SIZE) for _ in range(17)]
    requests: dict[str, list[int]] = {}
    for _ in range(30):
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
        prompt = [*(system if rng.random() < 0.5 else []), *own]
        request_id = engine.submit(prompt, max_tokens=rng.randint(1, 40), ignore_eos=True)
        requests[request_id] = prompt
        for _ in range(rng.randint(0, 2)):
            engine.step()
    engine.run()

    dense = load_dense(path)
    for request_id, prompt in requests.items():
        assert_greedy(dense, prompt, engine.answers[request_id].token_ids)
    stats = engine.core.stats()
    assert stats.num_preemptions > 0, "the pool was meant to be too small"
    assert (engine.core.parts.scheduler.num_swaps > 0) == (swap_bytes > 0)
    assert stats.num_cached_tokens > 0, "the shared beginning was meant to be reused"
    assert stats.num_free_kv_blocks == engine.core.info.num_kv_blocks, "blocks leaked"
    engine.close()


def test_with_sinks_an_answer_runs_past_what_the_pool_holds(tmp_path: Path) -> None:
    path = save_family(tmp_path / "model", *SERVED["llama"])
    engine = LocalEngine(
        path,
        tmp_path,
        kv_block_size=BLOCK_SIZE,
        kv_cache_bytes=20 * NUM_LAYERS * LAYER_BLOCK_BYTES,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        attention_window=WINDOW,
        attention_sinks=SINKS,
    )
    prompts = [[5, 17, 90, 3, 44] * 6, [77, 8]]
    ids = [engine.submit(prompt, max_tokens=200, ignore_eos=True) for prompt in prompts]
    engine.run()

    assert engine.core.info.max_model_len == 256
    assert engine.core.info.num_kv_blocks * BLOCK_SIZE < 200
    dense = load_dense(path)
    for prompt, answer in zip(prompts, engine.tokens(ids), strict=True):
        assert len(answer) == 200
        query = torch.arange(len(prompt) + 199)[:, None]
        key = query.T
        visible = (key <= query) & ((key > query - WINDOW) | (key < SINKS))
        mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
        assert_greedy(dense, prompt, answer, mask[None, None])
    engine.close()


def test_what_int8_keys_and_values_change_is_told_and_never_shared(tmp_path: Path) -> None:
    path = save_family(tmp_path / "model", *SERVED["llama"])
    plain = LocalEngine(path, tmp_path, kv_block_size=BLOCK_SIZE)
    int8 = LocalEngine(path, tmp_path, kv_block_size=BLOCK_SIZE, kv_dtype=KvDtype.INT8)
    assert int8.core.info.num_kv_blocks == 64 * plain.core.info.num_kv_blocks // (16 + 2)
    assert int8.core.info.runtime_id != plain.core.info.runtime_id
    assert any("KV cache in int8: changes logits by" in line for line in int8.core.info.memory_plan)
    assert not any("changes logits" in line for line in plain.core.info.memory_plan)
    assert len(int8.generate([3, 1, 4, 1, 5])) == 16
    plain.close()
    int8.close()
