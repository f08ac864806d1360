"""An engine of several ranks answers as one does, whatever happens to blocks and adapters."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.adapters.extents import Extent
from loraplex.engine.config import KvDtype, Quantization
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.messages import Pooling
from loraplex.engine.shards.rank_place import GroupShape
from support.engine import Answer, LocalEngine
from support.families import SERVED, STATES, save_family
from support.grammars import needs_llguidance
from support.marks import marked_slow
from support.models import make_adapter
from support.rank_traffic import Traffic, events, is_same
from support.ranks import followers_as_threads

FORMATS: tuple[dict[str, Any], ...] = (
    {"kv_dtype": KvDtype.INT4, "kv_cache_bytes": 512 << 10},
    {"kv_dtype": KvDtype.INT2, "kv_cache_bytes": 512 << 10},
    {"quantization": Quantization.FP8},
    {"quantization": Quantization.NF4, "embedding_quantization": Quantization.FP8},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("base"), *SERVED["llama"])


def assert_zero_outside(memory: torch.Tensor, extents: Iterable[Extent]) -> None:
    """Memory that holds adapters in these extents, and nothing of any other."""
    outside = torch.ones_like(memory, dtype=torch.bool)
    for extent in extents:
        outside[extent.offset : extent.end] = False
    assert memory.any()
    assert not memory[outside].any()


EXPERTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qwen3_moe", {}),
    ("qwen3_moe", {"quantization": Quantization.NF4}),
    ("deepseek_v2-mla", {"quantization": Quantization.FP8}),
)


@pytest.mark.parametrize("case", marked_slow(EXPERTS, slow=EXPERTS[1:]), ids=str)
def test_experts_have_the_tokens_of_one_rank(
    case: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Adapters change attention, experts and routers."""
    family, settings = case
    model = save_family(tmp_path / "base", *SERVED[family])
    changed: dict[str, Any] = {
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"],
    }
    folders = [
        make_adapter(model, tmp_path / str(r), seed=r, scale=0.1, r=r, **changed) for r in (4, 7, 2)
    ]

    def answer(num_ranks: int) -> list[list[int]]:
        engine = LocalEngine(
            model,
            tmp_path,
            dtype="float32",
            num_threads=1,
            tensor_parallel_size=num_ranks,
            **settings,
        )
        keys = [None, *map(engine.add_adapter, folders)]
        ids = [engine.submit([3, 17, 5, 90 + place], keys[place % 4]) for place in range(8)]
        engine.run()
        engine.close()
        return engine.tokens(ids)

    expected = answer(1)
    with followers_as_threads():
        assert answer(2) == expected


SHAPES = (GroupShape(2, 1), GroupShape(4, 1), GroupShape(1, 2), GroupShape(2, 2))
CASES = [(shape, has_drafts) for shape in SHAPES for has_drafts in (True, False)]
QUICK = {(SHAPES[0], True), (SHAPES[2], False)}


@needs_llguidance
@pytest.mark.parametrize("case", marked_slow(CASES, slow=set(CASES) - QUICK), ids=str)
def test_mixed_traffic_has_the_answers_of_one_rank(
    case: tuple[GroupShape, bool], tmp_path: Path
) -> None:
    """Steps of drafts are not in flight together, other steps of several stages are."""
    shape, has_drafts = case
    traffic = Traffic(tmp_path)
    alone = traffic.serve(GroupShape(1, 1), has_drafts=has_drafts)
    alone.close()
    with followers_as_threads() as followers:
        together = traffic.serve(shape, has_drafts=has_drafts)
        together.close()
    assert len(followers) == shape.size - 1
    assert_same_answers(together, alone, has_drafts=has_drafts)
    (deleted,) = together.evicted
    for follower in followers:
        blocks, occupants = follower.host.blocks(), follower.arena._occupants.values()
        assert deleted not in {block.key for block in blocks}
        assert deleted not in {occupant.key for occupant in occupants}
        assert_zero_outside(follower.host.pool, [block.extent for block in blocks])
        assert_zero_outside(follower.arena.flat, [occupant.extent for occupant in occupants])


@needs_llguidance
@pytest.mark.slow
@pytest.mark.parametrize(("size", "has_drafts"), [(2, True), (2, False), (4, False)])
def test_steps_in_flight_have_the_answers_of_one_rank(
    size: int, has_drafts: bool, tmp_path: Path
) -> None:
    traffic = Traffic(tmp_path)
    alone = traffic.serve(GroupShape(1, 1), has_drafts=has_drafts)
    alone.close()
    with followers_as_threads():
        together = traffic.serve(GroupShape(size, 1), has_drafts=has_drafts, async_scheduling=True)
        together.close()
    assert_same_answers(together, alone, has_drafts=has_drafts)


def assert_same_answers(together: LocalEngine, alone: LocalEngine, *, has_drafts: bool) -> None:
    """The group's traffic met what it is for, and every answer is that of one rank."""
    met = events(together)
    of_drafts = {"accepted_drafts"} if not has_drafts else set()
    assert all(count for name, count in met.items() if name not in {"swaps", *of_drafts}), met
    assert not [answer.end.error for answer in together.answers.values() if answer.end.error]
    assert together.answers.keys() == alone.answers.keys()
    different = [
        request_id
        for request_id, answer in alone.answers.items()
        if not is_same(answer, together.answers[request_id])
    ]
    assert different == []


@needs_llguidance
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "shape"),
    [*((each, SHAPES[0]) for each in FORMATS), *((each, SHAPES[2]) for each in FORMATS[2:])],
    ids=str,
)
def test_mixed_traffic_over_a_quantized_base_has_the_tokens_of_one_rank(
    settings: dict[str, Any], shape: GroupShape, tmp_path: Path
) -> None:
    traffic = Traffic(tmp_path)
    alone = traffic.serve(GroupShape(1, 1), has_drafts=False, **settings)
    alone.close()
    with followers_as_threads():
        together = traffic.serve(shape, has_drafts=False, **settings)
        together.close()
    assert together.core.stats().num_adapter_evictions > 0
    assert not [answer.end.error for answer in together.answers.values() if answer.end.error]
    assert together.tokens(together.answers) == alone.tokens(together.answers)


def test_an_int8_kv_cache_of_ranks_has_the_codes_of_one_rank(model: Path, tmp_path: Path) -> None:
    """A scale belongs to a token and a head, so it does not depend on the other ranks' heads."""

    def answer(num_ranks: int) -> tuple[list[int], float]:
        engine = LocalEngine(
            model,
            tmp_path,
            dtype="float32",
            num_threads=1,
            kv_dtype=KvDtype.INT8,
            tensor_parallel_size=num_ranks,
        )
        tokens = engine.generate([3, 17, 5, 90, 4, 22, 8])
        engine.close()
        return tokens, engine.core.parts.base.kv_error

    expected, kv_error = answer(1)
    with followers_as_threads():
        tokens, own_error = answer(2)
    assert tokens == expected
    assert own_error == pytest.approx(kv_error, rel=0.01)
    assert kv_error > 0


@pytest.mark.parametrize("family", ["gemma2-softcap-window", "phi3-fused", "qwen3_next"])
def test_windows_gathered_layers_and_states_have_the_answers_of_one_rank(
    family: str, tmp_path: Path
) -> None:
    """Two KV groups; a cache that is not divided. Answers with log-probabilities and vectors."""
    base = save_family(tmp_path / "base", *{**SERVED, **STATES}[family])
    prompts = [[3, 17, 5, 90, 4, 22, 8, 31, 9, 77, 6, 12], [1, 2, 3]]

    def answer(num_ranks: int) -> list[Answer]:
        engine = LocalEngine(
            base, tmp_path, dtype="float32", num_threads=1, tensor_parallel_size=num_ranks
        )
        ids = [engine.submit(prompt, max_tokens=12) for prompt in prompts]
        ids.append(engine.submit(prompts[0], max_tokens=2, num_prompt_logprobs=1))
        ids.append(engine.submit(prompts[0], max_tokens=0, pooling=Pooling.MEAN))
        engine.run()
        engine.close()
        return [engine.answers[request_id] for request_id in ids]

    expected = answer(1)
    with followers_as_threads():
        found = answer(2)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    ours, theirs = (answers[2].prompts[0].logprobs for answers in (found, expected))
    for own, other in zip(ours, theirs, strict=True):
        assert own.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)
    vectors = [
        np.frombuffer(answers[3].prompts[-1].embedding or b"", dtype=np.float32)
        for answers in (found, expected)
    ]
    assert len(vectors[0]) == 64
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-4)


def test_a_base_that_is_refused_leaves_no_follower(tmp_path: Path) -> None:
    mamba = save_family(tmp_path / "base", *STATES["mamba"])
    before = threading.active_count()
    with followers_as_threads(), pytest.raises(UnsupportedModel, match="it has no plan"):
        LocalEngine(mamba, tmp_path, dtype="float32", tensor_parallel_size=2)
    assert threading.active_count() == before
