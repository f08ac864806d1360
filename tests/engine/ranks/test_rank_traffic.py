"""An engine of several ranks answers as one does, whatever happens to blocks and adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loraplex.engine.config import KvDtype
from support.engine import LocalEngine
from support.families import SERVED, save_family
from support.marks import marked_slow
from support.models import make_adapter
from support.rank_traffic import RANKS, serve_waves
from support.ranks import followers_as_threads


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("base"), *SERVED["llama"])


@pytest.mark.parametrize("size", marked_slow((2, 4), slow={4}))
def test_mixed_traffic_has_the_tokens_of_one_rank(model: Path, tmp_path: Path, size: int) -> None:
    folders = [make_adapter(model, tmp_path / str(r), seed=r, scale=0.1, r=r) for r in RANKS]
    alone = serve_waves(model, folders, tmp_path, num_ranks=1)
    with followers_as_threads() as followers:
        together = serve_waves(model, folders, tmp_path, num_ranks=size)
        together.close()
    alone.close()
    statistics = together.core.stats()
    assert statistics.num_swaps > 0
    assert statistics.num_preemptions > 0
    assert statistics.num_adapter_evictions > 0
    assert len(together.evicted) == 1
    assert len(followers) == size - 1
    for follower in followers:
        held = torch.zeros_like(follower.host.pool, dtype=torch.bool)
        for block in follower.host.blocks():
            held[block.extent.offset : block.extent.end] = True
        assert 0 < follower.host.pool[held].count_nonzero() == follower.host.pool.count_nonzero()
    assert not [answer.end.error for answer in together.answers.values() if answer.end.error]
    assert together.tokens(together.answers) == alone.tokens(alone.answers)


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
