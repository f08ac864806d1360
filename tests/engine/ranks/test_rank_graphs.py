"""Captured decode steps of several ranks, on the CPU: a replay computes the step again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.errors import RankLost
from loraplex.engine.execution import decode_graphs
from loraplex.engine.messages import SpeculationParams
from loraplex.engine.model import base_model
from support.engine import LocalEngine
from support.families import SERVED, save_family
from support.marks import marked_slow
from support.models import make_adapter
from support.plain_tiles import add_tiles
from support.ranks import followers_as_threads
from support.speculation import ScriptedTreeProposer, scripted

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "speculation": ("ngram",),
}
PROMPTS = [[7 * row + column for column in range(3 + 5 * row)] for row in range(4)]
REPEATED = [3, 17, 5, 90, 4, 22] * 4


def compute_again(compute: Callable[[], None]) -> Callable[[], None]:
    """Stands in for CUDA: computes what was captured again when it is replayed."""
    compute()
    return compute


@contextmanager
def capturing(
    monkeypatch: pytest.MonkeyPatch,
    capture: Callable[[Callable[[], None]], Callable[[], None]] = compute_again,
) -> Iterator[None]:
    """Engines that are opened here capture their decode steps."""
    module = ModuleType("lora_triton")
    module.add_tiles = add_tiles  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "loraplex.kernels.lora_triton", module)
        patch.setattr(decode_graphs, "CudaCapture", lambda _device: capture)
        patch.setattr(decode_graphs, "_is_captured", lambda *_: True)
        # It changes torch's global state, which ranks that are threads share.
        patch.setattr(base_model, "find_host_reads", lambda _model: [])
        yield


def answer(engine: LocalEngine, keys: list[AdapterKey]) -> list[list[int]]:
    """Decodes of one to four sequences, with adapters and without, and draft tokens."""
    ids = []
    for prompt, key in zip(PROMPTS, [None, *keys], strict=True):
        ids.append(engine.submit(prompt, key, max_tokens=8, temperature=0.5, seed=len(prompt)))
        engine.step()
    engine.run()
    for proposer in ("ngram", ScriptedTreeProposer.name):
        drafted = SpeculationParams(proposer, 3)
        ids.append(engine.submit(REPEATED, keys[0], max_tokens=8, speculation=drafted))
        engine.run()
    return engine.tokens(ids)


@pytest.mark.parametrize("async_scheduling", marked_slow([True, False], slow={False}), ids=str)
def test_replays_of_all_ranks_give_what_one_rank_computes(
    async_scheduling: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapters' ranks need two classes of graphs, one of them captured when it is needed."""
    model = save_family(tmp_path / "base", *SERVED["llama"])
    folders = [
        make_adapter(model, tmp_path / str(r), seed=r, scale=0.1, r=r, use_dora=r == 3)
        for r in (4, 24, 3)
    ]
    trees = ScriptedTreeProposer({})
    with scripted(trees) as name:
        settings = {**SETTINGS, "speculation": ("ngram", name)}
        alone = LocalEngine(model, tmp_path, **settings)
    expected = answer(alone, list(map(alone.add_adapter, folders)))
    alone.close()
    trees.answers = {"r5": expected[5]}
    with scripted(trees), capturing(monkeypatch), followers_as_threads() as followers:
        engine = LocalEngine(
            model,
            tmp_path,
            **settings,
            tensor_parallel_size=2,
            async_scheduling=async_scheduling,
        )
        found = answer(engine, list(map(engine.add_adapter, folders)))
        engine.close()
    assert found == expected
    stats = engine.core.stats()
    assert stats.num_graph_steps > 10
    accepted = {total.proposer: total.num_accepted_tokens for total in stats.speculation_totals}
    assert accepted[trees.name] > 1
    assert stats.num_eager_decodes == 0
    graphs = [engine.core.parts.runner._graphs, followers[0].steps._graphs]
    captured = [list(each._replays) for each in graphs if each]
    assert captured[0] == captured[1], "every rank captures the same steps in the same order"
    assert {shape.rank for shape in captured[0]} == {0, 16, 64}


def test_a_capture_that_fails_on_one_rank_ends_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one rank the step would run without a graph, but other ranks would replay theirs."""
    model = save_family(tmp_path / "base", *SERVED["llama"])
    folder = make_adapter(model, tmp_path / "adapter", seed=1, r=24)
    has_started = False

    def fail_later(compute: Callable[[], None]) -> Callable[[], None]:
        compute()
        if has_started:
            raise RuntimeError("operation not permitted when stream is capturing")
        return compute

    with capturing(monkeypatch, fail_later), followers_as_threads():
        engine = LocalEngine(model, tmp_path, **SETTINGS, tensor_parallel_size=2)
        key = engine.add_adapter(folder)
        has_started = True
        engine.submit([1, 2, 3], key, max_tokens=4)
        with pytest.raises(RankLost):
            engine.run()
        engine.close()
