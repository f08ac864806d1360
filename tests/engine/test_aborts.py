"""What an abort releases, and when."""

from __future__ import annotations

import random
from pathlib import Path

from loraplex.engine.messages import Abort
from support.engine import LocalEngine
from support.models import make_adapter

NUM_ABORTS = 1000


def test_a_thousand_aborts_at_any_moment_give_every_block_back_at_once(
    tiny_base: Path, tmp_path: Path
) -> None:
    engine = LocalEngine(tiny_base, tmp_path, max_num_seqs=8, max_num_batched_tokens=64)
    adapter = engine.add_adapter(make_adapter(tiny_base, tmp_path / "adapter", seed=1))
    engine.generate([1, 2, 3], adapter)
    free_blocks = engine.core.stats().num_free_kv_blocks
    draw = random.Random(0)
    num_held = 0
    for number in range(0, NUM_ABORTS, 10):
        ids = [
            engine.submit(
                [draw.randrange(200) for _ in range(draw.randrange(1, 150))],
                draw.choice([None, adapter]),
                request_id=f"r{number + index}",
                max_tokens=200,
                ignore_eos=True,
            )
            for index in range(10)
        ]
        for _ in range(draw.randrange(6)):
            engine.step()
        draw.shuffle(ids)
        for request_id in ids:
            num_held += engine.core.stats().num_free_kv_blocks < free_blocks
            engine.core.handle(Abort(request_id))
            engine.core.handle(Abort(request_id))
        stats = engine.core.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_kv_blocks == free_blocks
        assert all(entry.num_leases == 0 for entry in stats.adapters)
    assert num_held > NUM_ABORTS / 4, "most were aborted while requests held blocks"
    engine.close()
