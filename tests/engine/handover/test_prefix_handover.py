"""One engine computes prompts, another one decodes: against one engine that does both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.grammars.spec import GrammarKind, GrammarSpec
from loraplex.engine.handover import prefix_handover
from loraplex.engine.messages import (
    DeleteAdapter,
    FinishReason,
    PrefixPiece,
    PrefixTransport,
    StepEvents,
)
from support.engine import LocalEngine
from support.families import SERVED, STATES, VOCAB_SIZE, save_family
from support.marks import marked_slow
from support.models import make_adapter

BLOCK_SIZE = 8
TARGETS = {"mamba2": ["in_proj"]}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "fp32": ("llama", {}),
    "int8": ("llama", {"kv_dtype": "int8"}),
    "int4": ("llama", {"kv_dtype": "int4"}),
    "windows": ("gemma3-window", {}),
    "sinks": ("llama", {"attention_window": 21, "attention_sinks": 3}),
    "latent": ("deepseek_v2-mla", {}),
    "states": ("mamba2", {}),
    "drafts": ("llama", {"speculation": ("ngram",)}),
    "two steps in flight": ("llama", {"async_scheduling": True}),
}
SLOW = {"states", "windows", "int4", "int8", "drafts", "latent", "sinks", "two steps in flight"}


class Engines:
    """One that computes prompts, one that decodes, and one that does both."""

    def __init__(self, base: Path, path: Path, adapters: Sequence[Path], **config: Any) -> None:
        settings = {
            "dtype": "float32",
            "num_threads": 1,
            "kv_block_size": BLOCK_SIZE,
            "swap_bytes": 4 << 20,
            **config,
        }
        self._open = partial(LocalEngine, base, path, **settings)
        self._adapters = adapters
        self.prefill, self.decode = self._open(), self._open()
        self.keys: list[AdapterKey] = []
        for engine in (self.prefill, self.decode):
            self.keys = [engine.add_adapter(adapter) for adapter in adapters]

    @cached_property
    def whole(self) -> LocalEngine:
        engine = self._open()
        for adapter in self._adapters:
            engine.add_adapter(adapter)
        return engine

    def compute(
        self,
        prompt: list[int],
        key: AdapterKey | None,
        transport: PrefixTransport = PrefixTransport.FRAMES,
    ) -> list[PrefixPiece]:
        """What the first engine sends of a prompt."""
        self.prefill.pieces.clear()
        self.prefill.submit(
            prompt, key, max_tokens=0, exports_prefix=True, prefix_transport=transport
        )
        self.prefill.run()
        return list(self.prefill.pieces)

    def await_prefix(self, prompt: list[int], key: AdapterKey | None, **settings: Any) -> str:
        return self.decode.submit(prompt, key, awaits_prefix=True, **settings)

    def give(self, request_id: str, pieces: Sequence[PrefixPiece]) -> None:
        for piece in pieces:
            self.decode.core.handle(replace(piece, request_id=request_id))

    def expected(self, prompt: list[int], key: AdapterKey | None, **settings: Any) -> list[int]:
        request_id = self.whole.submit(prompt, key, **settings)
        self.whole.run()
        return self.whole.answers[request_id].token_ids


def prompts(count: int) -> list[list[int]]:
    generator = random.Random(1)
    return [
        [generator.randrange(3, VOCAB_SIZE) for _ in range(generator.randrange(5, 70))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("case", marked_slow(CASES, slow=SLOW))
def test_tokens_are_those_of_one_engine(case: str, tmp_path: Path) -> None:
    family, config = CASES[case]
    base = save_family(tmp_path / "base", *{**SERVED, **STATES}[family])
    targets = TARGETS.get(family, ["o_proj", "down_proj"])
    adapters = [
        make_adapter(base, tmp_path / f"{r}", seed=r, r=r, target_modules=targets) for r in (2, 8)
    ]
    engines = Engines(base, tmp_path, adapters, **config)
    wanted, ids = [], []
    for index, prompt in enumerate(prompts(9)):
        key = [None, *engines.keys][index % 3]
        settings = {"temperature": index % 2, "seed": index, "max_tokens": 12, "ignore_eos": True}
        request_id = engines.await_prefix(prompt, key, **settings)
        transport = [PrefixTransport.FRAMES, PrefixTransport.MEMORY][index % 2]
        pieces = engines.compute(prompt, key, transport)
        assert {piece.transport for piece in pieces if piece.groups} <= {transport}
        engines.give(request_id, pieces)
        wanted.append(engines.expected(prompt, key, **settings))
        ids.append(request_id)
    engines.decode.run()
    assert engines.decode.tokens(ids) == wanted
    stats = engines.decode.core.stats()
    computed = stats.num_prompt_tokens - stats.num_cached_tokens
    if family not in STATES:  # a prompt's last tokens, less than two blocks, are computed here
        assert computed <= 9 * BLOCK_SIZE
    assert stats.num_cached_tokens > stats.num_prompt_tokens / 3
    engines.decode.core.parts.kv.check_integrity([])
    for request_id, prompt in zip(ids, prompts(9), strict=True):
        assert engines.decode.answers[request_id].end.num_prompt_tokens == len(prompt)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    path = tmp_path_factory.mktemp("engines")
    base = save_family(path / "base", *SERVED["llama"])
    return Engines(base, path, [make_adapter(base, path / "adapter", seed=1)])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["snapkv:40", "h2o:40"])
def test_with_a_kv_policy_of_the_engine_tokens_are_those_of_one_engine(
    policy: str, tmp_path: Path
) -> None:
    """An API server does not know that policy. It evicts what a prefix would need."""
    base = save_family(tmp_path / "base", *SERVED["llama"])
    engines = Engines(base, tmp_path, [], kv_policy=policy)
    wanted, ids = [], []
    for prompt in ([*each, *PROMPT] for each in prompts(3)):
        request_id = engines.await_prefix(prompt, None, max_tokens=24, ignore_eos=True)
        engines.give(request_id, engines.compute(prompt, None))
        wanted.append(engines.expected(prompt, None, max_tokens=24, ignore_eos=True))
        ids.append(request_id)
    engines.decode.run()
    assert engines.decode.tokens(ids) == wanted
    engines.decode.core.parts.kv.check_integrity([])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("mistral-window", {}),
        ("llama", {"attention_window": 24, "attention_sinks": 0}),
        ("mamba2", {}),
    ],
)
def test_an_endless_output_after_a_handover_is_that_of_one_engine(
    family: str, config: dict[str, object], tmp_path: Path
) -> None:
    """It goes on far beyond the context, of which the prompt takes most."""
    base = save_family(tmp_path / "base", *{**SERVED, **STATES}[family])
    engines = Engines(base, tmp_path, [], max_model_len=64, **config)
    prompt = PROMPT[:60]
    settings = {"max_tokens": 150, "ignore_eos": True, "is_endless": True, "seed": 3}
    request_id = engines.await_prefix(prompt, None, **settings)
    pieces = engines.compute(prompt, None)
    assert any(piece.groups for piece in pieces)
    engines.give(request_id, pieces)
    engines.decode.run()
    assert cached(engines, request_id) > 0
    tokens = engines.decode.answers[request_id].token_ids
    assert len(tokens) == 150
    assert tokens == engines.expected(prompt, None, **settings)


PROMPT = prompts(1)[0] + [5] * 40


def cached(engines: Engines, request_id: str) -> int:
    started = engines.decode.answers[request_id].started
    assert started is not None
    return started.num_cached_tokens


def test_a_request_waits_for_the_last_piece(engines: Engines) -> None:
    pieces = engines.compute(PROMPT, None)
    request_id = engines.await_prefix(PROMPT, None, max_tokens=3)
    for _ in range(20):
        engines.decode.step()
    assert engines.decode.answers[request_id].started is None
    engines.give(request_id, pieces)
    engines.decode.run()
    assert cached(engines, request_id) >= len(PROMPT) - 2 * BLOCK_SIZE
    started = engines.decode.answers[request_id].started
    assert started is not None
    assert 0 < started.prefix_wait_seconds <= started.queue_seconds
    assert engines.decode.answers[request_id].token_ids == engines.expected(
        PROMPT, None, max_tokens=3
    )


def test_a_part_of_a_prefix_or_none_is_completed_here(engines: Engines) -> None:
    prompt = [7, *PROMPT]
    (piece,) = engines.compute(prompt, None)
    half = [
        replace(group, indices=group.indices[:2], pages=[_first(p, 2, group) for p in group.pages])
        for group in piece.groups
    ]
    for groups, num_cached in ([], 0), (half, 2 * BLOCK_SIZE):
        request_id = engines.await_prefix(
            prompt, None, max_tokens=4, cache_namespace=f"{num_cached}"
        )
        engines.give(request_id, [replace(piece, groups=groups)])
        engines.decode.run()
        assert cached(engines, request_id) == num_cached
        expected = engines.expected(prompt, None, max_tokens=4)
        assert engines.decode.answers[request_id].token_ids == expected


def _first(page: bytes, count: int, group: Any) -> bytes:
    """The first blocks of a page `[parts, blocks, ...]`: keys and values of two layers."""
    part = len(page) // 4
    size = part // len(group.indices) * count
    return b"".join(page[index * part :][:size] for index in range(4))


def test_pages_in_shared_memory_are_read_once_and_completed_here_if_they_are_gone(
    engines: Engines,
) -> None:
    prompt = [17, *PROMPT]
    pieces = engines.compute(prompt, None, PrefixTransport.MEMORY)
    assert [piece.place is not None for piece in pieces] == [True]
    found = []
    for namespace in ("first", "second"):
        request_id = engines.await_prefix(prompt, None, max_tokens=4, cache_namespace=namespace)
        engines.give(request_id, pieces)
        engines.decode.run()
        expected = engines.expected(prompt, None, max_tokens=4)
        assert engines.decode.answers[request_id].token_ids == expected
        found.append(cached(engines, request_id))
    assert found[0] >= len(prompt) - 2 * BLOCK_SIZE
    assert found[1] == 0


def test_a_deletion_erases_pages_that_nobody_has_read(tmp_path: Path) -> None:
    base = save_family(tmp_path / "base", *SERVED["llama"])
    engines = Engines(base, tmp_path, [make_adapter(base, tmp_path / "adapter", seed=1)])
    (key,) = engines.keys
    request_id = engines.await_prefix(PROMPT, None, max_tokens=2)
    (piece,) = engines.compute(PROMPT, key, PrefixTransport.MEMORY)
    assert piece.place is not None
    path = Path(f"/proc/self/fd/{piece.place.descriptor}")
    with path.open("rb") as file:
        assert len(file.read()) > sum(map(sum, piece.place.sizes)) > 0
        engines.prefill.core.handle(DeleteAdapter(key))
        file.seek(0)
        assert file.read() == b"", "for whoever has it open too"
    engines.give(request_id, [piece])
    engines.decode.run()
    assert cached(engines, request_id) == 0


def test_a_prefix_is_of_the_tenant_and_adapter_of_the_request_that_awaits_it(
    engines: Engines,
) -> None:
    prompt, (key,) = [9, *PROMPT], engines.keys
    pieces = engines.compute(prompt, key)
    request_id = engines.await_prefix(prompt, key, max_tokens=2)
    engines.give(request_id, pieces)
    engines.decode.run()
    assert cached(engines, request_id) > 0
    for other in (
        engines.decode.submit(prompt, None, max_tokens=2),
        engines.decode.submit(prompt, None, max_tokens=2, tenant_id="globex"),
    ):
        engines.decode.run()
        assert cached(engines, other) == 0
        expected = engines.expected(prompt, None, max_tokens=2)
        assert engines.decode.answers[other].token_ids == expected


@pytest.mark.parametrize("prefix_first", marked_slow([True, False], slow=[False]))
def test_a_grammar_and_a_prefix_are_both_waited_for(
    prefix_first: bool, tiny_base: Path, tmp_path: Path
) -> None:
    engines = Engines(tiny_base, tmp_path, [])
    grammar = GrammarSpec(GrammarKind.REGEX, "[0-9]{6}x*")
    settings = {"max_tokens": 8, "grammar": grammar}
    request_id = engines.await_prefix(PROMPT, None, **settings)
    answer = engines.decode.answers[request_id]
    if not prefix_first:
        while engines.decode.core.parts.grammars.pending:
            engines.decode.step()
        assert answer.started is None
    engines.give(request_id, engines.compute(PROMPT, None))
    engines.decode.run()
    assert cached(engines, request_id) >= len(PROMPT) - 2 * BLOCK_SIZE
    assert answer.token_ids == engines.expected(PROMPT, None, **settings)


def test_an_engine_without_host_memory_computes_the_prompt(
    engines: Engines, tmp_path: Path
) -> None:
    base = save_family(tmp_path / "base", *SERVED["llama"])
    small = LocalEngine(base, tmp_path, dtype="float32", kv_block_size=BLOCK_SIZE)
    request_id = small.submit(PROMPT, max_tokens=3, awaits_prefix=True)
    for piece in engines.compute(PROMPT, None):
        small.core.handle(replace(piece, request_id=request_id))
    small.run()
    assert small.answers[request_id].token_ids == engines.expected(PROMPT, None, max_tokens=3)


def test_pieces_for_nobody_are_ignored(engines: Engines) -> None:
    kv = engines.decode.core.parts.kv
    before = kv.host_counts
    pieces = engines.compute([11, *PROMPT], None)
    engines.give("unknown", pieces)
    aborted = engines.await_prefix([11, *PROMPT], None, max_tokens=2)
    engines.decode.abort(aborted)
    engines.give(aborted, pieces)
    ended = engines.decode.submit([11, *PROMPT], max_tokens=2)
    engines.give(ended, pieces)
    engines.decode.run()
    assert kv.host_counts == before
    assert cached(engines, ended) == 0


@pytest.mark.parametrize("difference", ["sizes", "groups"])
def test_pages_of_an_engine_with_another_cache_end_nothing(
    difference: str, engines: Engines
) -> None:
    prompt = [13 + len(difference), *PROMPT]
    (piece,) = engines.compute(prompt, None)
    wrong = {
        "sizes": [replace(own, pages=[page[:-4] for page in own.pages]) for own in piece.groups],
        "groups": [*piece.groups, *piece.groups],
    }
    request_id = engines.await_prefix(prompt, None, max_tokens=4)
    engines.give(request_id, [replace(piece, groups=wrong[difference])])
    engines.decode.run()
    assert engines.decode.answers[request_id].token_ids == engines.expected(
        prompt, None, max_tokens=4
    )


def test_a_deletion_reaches_what_was_handed_over(tmp_path: Path) -> None:
    base = save_family(tmp_path / "base", *SERVED["llama"])
    engines = Engines(base, tmp_path, [make_adapter(base, tmp_path / "adapter", seed=1)])
    (key,), kv = engines.keys, engines.decode.core.parts.kv
    pieces = engines.compute(PROMPT, key)
    waiting = engines.await_prefix(PROMPT, key, max_tokens=2)
    engines.give(waiting, [replace(piece, is_last=False) for piece in pieces])
    (slots,) = [list(group.host.prefixes._prefixes) for group in kv.groups]
    pages = [page[:, slots] for page in engines.decode.core.parts.runner._cache._host[0].tensors]
    assert slots
    assert all(page.any() for page in pages)
    engines.decode.core.handle(DeleteAdapter(key))
    engines.decode.run()
    error = engines.decode.answers[waiting].end.error
    assert error is not None
    assert error.code == "adapter_deleted"
    engines.give(waiting, pieces)
    assert sum(kv.host_counts) == 0
    pages = [page[:, slots] for page in engines.decode.core.parts.runner._cache._host[0].tensors]
    assert not any(page.any() for page in pages), "the pages are zero"


def test_a_prompt_that_is_computed_during_a_deletion_is_not_handed_over(tmp_path: Path) -> None:
    base = save_family(tmp_path / "base", *SERVED["llama"])
    adapter = make_adapter(base, tmp_path / "adapter", seed=1)
    engines = Engines(base, tmp_path, [adapter], max_num_batched_tokens=16, max_num_seqs=4)
    (key,), prefill = engines.keys, engines.prefill
    request_id = prefill.submit(PROMPT, key, max_tokens=0, exports_prefix=True)
    while prefill.answers[request_id].started is None:
        prefill.step()
    prefill.core.handle(DeleteAdapter(key, 30.0))
    prefill.run()
    assert prefill.answers[request_id].end.reason is FinishReason.LENGTH
    assert [(piece.groups, piece.is_last) for piece in prefill.pieces] == [([], True)]
    assert prefill.evicted == [key]


def test_what_was_cached_of_a_prompt_is_announced_before_its_pages(engines: Engines) -> None:
    core = engines.prefill.core
    engines.prefill.submit([15, *PROMPT], max_tokens=0, exports_prefix=True)
    kinds: list[type] = []
    while core.has_work:
        kinds += [type(message) for message in core.step()]
    assert [each for each in kinds if each in (StepEvents, PrefixPiece)] == [
        StepEvents,
        PrefixPiece,
    ]


def test_pieces_that_wait_for_their_turn_are_emptied_by_a_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_handover, "PIECE_BYTES", 1)
    base = save_family(tmp_path / "base", *SERVED["llama"])
    engines = Engines(base, tmp_path, [make_adapter(base, tmp_path / "adapter", seed=1)])
    (key,) = engines.keys
    pieces = engines.compute(PROMPT, key)
    assert [piece.is_last for piece in pieces] == [False] * (len(PROMPT) // BLOCK_SIZE - 1) + [True]
    request_id = engines.await_prefix(PROMPT, key, max_tokens=5)
    engines.give(request_id, pieces)
    engines.decode.run()
    expected = engines.expected(PROMPT, key, max_tokens=5)
    assert engines.decode.answers[request_id].token_ids == expected
    engines.prefill.pieces.clear()
    engines.prefill.submit(PROMPT, key, max_tokens=0, exports_prefix=True)
    while not engines.prefill.pieces:
        engines.prefill.step()
    engines.prefill.core.handle(DeleteAdapter(key))
    engines.prefill.run()
    first, *others = engines.prefill.pieces
    assert first.groups[0].pages
    assert len(others) == len(pieces) - 1
    assert not any(piece.groups for piece in others)
    assert others[-1].is_last


def test_a_host_with_less_room_than_a_piece_keeps_no_mixture(tmp_path: Path) -> None:
    """Later blocks of the piece displace earlier ones."""
    base = save_family(tmp_path / "base", *SERVED["llama"])
    engines = Engines(base, tmp_path, [])
    whole = engines.decode.core.parts.runner.cache.block_bytes[0]
    engines.decode = LocalEngine(
        base, tmp_path, dtype="float32", kv_block_size=BLOCK_SIZE, swap_bytes=3 * whole
    )
    host = engines.decode.core.parts.kv.groups[0].host
    assert host.num_slots == 3
    request_id = engines.await_prefix(PROMPT, None, max_tokens=4)
    (piece,) = engines.compute(PROMPT, None)
    written: list[int] = []
    runner = engines.decode.core.parts.runner
    write_host = runner.write_host

    def note(group: int, slots: Sequence[int | None], pages: Sequence[bytes]) -> None:
        written.extend(slot for slot in slots if slot is not None)
        write_host(group, slots, pages)

    runner.write_host = note  # type: ignore[method-assign]
    engines.give(request_id, [piece])
    assert sorted(written) == [0, 1, 2], "each slot once"
    engines.decode.run()
    assert engines.decode.answers[request_id].token_ids == engines.expected(
        PROMPT, None, max_tokens=4
    )
