"""With asynchronous scheduling, ranks compute steps whose tokens no host has read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from loraplex.engine.messages import FinishReason
from loraplex.engine.model.inputs import SampledTokens
from loraplex.engine.ranks.commands import RunChunks
from loraplex.engine.ranks.step_tokens import AwaitedTokens, SentTokens
from loraplex.engine.shards.rank_sums import RankSums
from support.engine import LocalEngine
from support.families import SERVED, save_family
from support.models import make_adapter
from support.ranks import followers_as_threads, run_ranks

PROMPT = list(range(20))
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 5, "ignore_eos": True}


def count_pending(engine: LocalEngine) -> list[int]:
    """For each step that follows, the rows whose tokens the followers wait for."""
    followers: Any = engine.core.parts.group and engine.core.parts.group.followers
    tell, numbers = followers.tell, []

    def count(command: Any) -> None:
        if isinstance(command, RunChunks):
            numbers.append(command.num_pending)
        tell(command)

    followers.tell = count
    return numbers


def test_ended_and_aborted_requests_get_nothing_of_the_steps_in_flight(tmp_path: Path) -> None:
    model = save_family(tmp_path / "base", *SERVED["llama"])
    folder = make_adapter(model, tmp_path / "adapter", seed=1, scale=0.1, r=4)
    settings: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_batched_tokens": 65}

    alone = LocalEngine(model, tmp_path, **settings)
    key = alone.add_adapter(folder)
    ids = [alone.submit(PROMPT, each, max_tokens=12, **DRAWN) for each in (None, key)]
    alone.run()
    expected = alone.tokens(ids)
    alone.close()
    stop = next(token for token in expected[0][3:] if token not in expected[0][:3])

    with followers_as_threads() as followers:
        engine = LocalEngine(
            model, tmp_path, **settings, async_scheduling=True, tensor_parallel_size=2
        )
        assert engine.add_adapter(folder) == key
        numbers = count_pending(engine)
        stopped = engine.submit(PROMPT, max_tokens=12, stop_token_ids=[stop], **DRAWN)
        whole = engine.submit(PROMPT, key, max_tokens=12, **DRAWN)
        aborted = engine.submit(PROMPT, max_tokens=12, **DRAWN)
        while len(engine.answers[aborted].token_ids) < 3:
            engine.step()
        engine.abort(aborted)
        engine.run()
        engine.close()

    assert engine.answers[stopped].token_ids == expected[0][: expected[0].index(stop) + 1]
    assert engine.answers[stopped].end.reason is FinishReason.STOP
    assert engine.answers[whole].token_ids == expected[1]
    assert engine.answers[aborted].token_ids == expected[0][:3]
    assert 2 in numbers, "both requests were in flight"
    assert engine.core.stats().num_free_kv_blocks == engine.core.info.num_kv_blocks
    assert len(followers) == 1


def test_followers_get_the_tokens_that_rank_0_has_sampled_and_those_that_it_knows() -> None:
    sources = [2, -1, 0]

    def fill(ranks: RankSums) -> list[int]:
        if ranks.place.rank:
            input_ids = torch.zeros(5, dtype=torch.int64)
            pending = AwaitedTokens(len(sources), ranks)
            pending.fill(input_ids, torch.tensor(pending.sources))
        else:
            input_ids = torch.tensor([0, 11, 0, 12, 13])
            sent = SentTokens(SampledTokens(torch.tensor([7, 8, 9]), sources), ranks)
            sent.fill(input_ids, torch.tensor(sent.sources))
        return input_ids.tolist()

    assert run_ranks(3, fill) == [[9, 11, 7, 12, 13], [9, 11, 7, 0, 0], [9, 11, 7, 0, 0]]
