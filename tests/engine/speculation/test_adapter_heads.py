"""EAGLE heads that adapters bring along draft for the requests of these adapters alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from loraplex.adapters.export import export_adapter
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.leases import Lease
from loraplex.engine.messages import DeleteAdapter, SpeculationParams
from loraplex.engine.model.load_quantization import LoadQuantization
from loraplex.engine.speculation import adapter_heads, packed_head
from loraplex.engine.speculation.adapter_heads import AdapterHeads
from loraplex.engine.speculation.attached_head import attach_head
from loraplex.engine.speculation.draft_head import DraftHead
from loraplex.engine.speculation.eagle import EagleProposer, load_eagle
from loraplex.engine.speculation.head_slot import HeadSlot
from loraplex.engine.speculation.head_values import outline, values_of
from loraplex.engine.speculation.packed_head import PackedHead
from loraplex.kernels.linear import DenseLinear, Linear
from loraplex.kernels.linear_packing import pack_linear
from support.eagle import load_head_for, save_changed_head, save_random_head
from support.engine import LocalEngine
from support.models import make_adapter

NUM_TOKENS, NUM_DRAFTED = 12, 3
PROMPTS = [[5, 6, 7, 8], [9, 3, 200, 4, 17], [50, 51, 52]]


@pytest.fixture(scope="module")
def folder(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base's head, two heads that continue it, one that does not, and adapters with and without
    them."""
    folder = tmp_path_factory.mktemp("heads")
    save_random_head(tiny_base, folder / "base")
    for seed, name in enumerate(("first", "second", "foreign"), start=1):
        save_changed_head(
            tiny_base, folder / "base", folder / name, seed=seed, reads_same=name != "foreign"
        )
        plain = make_adapter(tiny_base, folder / f"plain-{name}", seed=seed)
        with_head = folder / f"with-{name}"
        with_head.mkdir()
        attach_head(load_head_for(tiny_base, folder / name), plain, with_head)
    return folder


@pytest.fixture
def engines(tiny_base: Path, folder: Path, tmp_path: Path) -> Iterator[Any]:
    opened: list[LocalEngine] = []

    def open_engine(
        head: str | None, num_adapter_heads: int = 0, proposer: str = "eagle"
    ) -> LocalEngine:
        blocks = tmp_path / str(len(opened))
        blocks.mkdir()
        speculation = () if head is None else (f"{proposer}:{folder / head}",)
        engine = LocalEngine(
            tiny_base,
            blocks,
            dtype="float32",
            speculation=speculation,
            adapter_draft_heads=num_adapter_heads,
        )
        opened.append(engine)
        return engine

    yield open_engine
    for engine in opened:
        engine.close()


def proposer_of(engine: LocalEngine) -> EagleProposer:
    (proposer,) = engine.core.parts.speculation._proposers.values()
    assert isinstance(proposer, EagleProposer)
    return proposer


def packed(head: DraftHead) -> PackedHead:
    assert isinstance(head, PackedHead)
    return head


def ready_heads(engine: LocalEngine) -> AdapterHeads:
    adapters = proposer_of(engine)._steps.adapters
    assert adapters is not None
    return adapters


Drafts = list[tuple[int, ...]]


def generate(
    engine: LocalEngine, keys: list[AdapterKey | None], patch: pytest.MonkeyPatch
) -> tuple[list[list[int]], list[Drafts]]:
    """A request for each key, all in one batch: their answers, and the drafts for each."""
    ids = []
    asked = SpeculationParams(num_tokens=NUM_DRAFTED)
    for prompt, key in zip(PROMPTS, keys, strict=False):
        tenant = "acme" if key is None else key.tenant_id
        ids.append(
            engine.submit(
                prompt,
                key,
                tenant_id=tenant,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                speculation=asked if engine.core.parts.config.speculation else None,
            )
        )
    drafts: dict[str, Drafts] = {request_id: [] for request_id in ids}
    propose = EagleProposer.propose

    def spying(proposer: EagleProposer, wanted: Any) -> Any:
        made = propose(proposer, wanted)
        for (request, _), draft in zip(wanted, made, strict=True):
            drafts[request.request_id].append(tuple(draft.token_ids))
        return made

    with patch.context() as context:
        context.setattr(EagleProposer, "propose", spying)
        engine.run()
    return [engine.answers[each].token_ids for each in ids], [drafts[each] for each in ids]


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["eagle", "eagle_tree"])
def test_each_request_of_a_batch_is_drafted_for_by_its_own_adapters_head(
    engines: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    """As an engine does that has this head for all, and with the answers of plain decoding."""
    adapters = [folder / "with-first", folder / "with-second"]
    mixed, plain = engines("base", 2, proposer), engines(None)
    keys = [None, *map(mixed.add_adapter, adapters)]
    answers, drafts = generate(mixed, keys, monkeypatch)
    assert len(ready_heads(mixed)) == 2
    assert answers == generate(plain, [None, *map(plain.add_adapter, adapters)], monkeypatch)[0]
    for place, head in enumerate(("base", "first", "second")):
        alone = engines(head, proposer=proposer)
        same = [None, *map(alone.add_adapter, adapters)]
        assert drafts[place] == generate(alone, same, monkeypatch)[1][place]
    assert sum(map(len, drafts)) > len(drafts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_heads"),
    [("with-foreign", 2), ("with-first", 0), ("plain-first", 2)],
)
def test_a_head_that_is_not_served_takes_no_memory_and_the_bases_drafts(
    engines: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, num_heads: int
) -> None:
    engine, without = engines("base", num_heads), engines("base")
    plain = folder / name.replace("with", "plain")
    results = [
        generate(each, [None, each.add_adapter(path)], monkeypatch)
        for each, path in ((engine, folder / name), (without, plain))
    ]
    assert results[0] == results[1]
    arenas = [each.core.parts.tiers.arena for each in (engine, without)]
    assert arenas[0].used_bytes == arenas[1].used_bytes
    assert not arenas[0].row_draft_heads


def test_a_deleted_adapters_head_is_erased_in_every_form(
    engines: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("base", 1)
    key = engine.add_adapter(folder / "with-first")
    stacked: list[torch.Tensor] = []

    def spying(weight: torch.Tensor, **options: Any) -> Linear:
        stacked.append(weight)
        return pack_linear(weight, **options)

    monkeypatch.setattr(packed_head, "pack_linear", spying)
    generate(engine, [key], monkeypatch)
    heads, arena = ready_heads(engine), engine.core.parts.tiers.arena
    ((row, ready),) = heads._ready.items()
    assert ready.slot.head.norms.output.any()
    assert arena.draft_head(row) is not None
    engine.core.handle(DeleteAdapter(key, 0.0))
    deadline = time.monotonic() + 10
    while arena.used_bytes and time.monotonic() < deadline:
        engine.core.step()
    assert len(heads) == 0
    assert arena.draft_head(row) is None
    assert not arena.flat.any()
    kept = [each for linear in ready.slot.head.linears for each in linear.buffers()]
    assert len(kept) >= len(ready.slot.head.linears)
    assert not any(each.any() for each in (*kept, *ready.slot.head.norms))
    assert stacked
    assert not any(each.any() for each in stacked)
    assert packed(proposer_of(engine)._steps.head).norms.output.any()


def test_an_erased_packed_head_leaves_its_adapters_weights(
    engines: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("base", 1)
    generate(engine, [engine.add_adapter(folder / "with-first")], monkeypatch)
    heads, arena = ready_heads(engine), engine.core.parts.tiers.arena
    (row,) = heads._ready
    before = arena.flat.clone()
    heads.forget(row)
    assert arena.draft_head(row) is not None
    assert torch.equal(arena.flat, before)


def test_without_room_the_bases_head_drafts_until_another_one_was_idle_for_long(
    engines: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("base", 1)
    first, second = (engine.add_adapter(folder / f"with-{name}") for name in ("first", "second"))
    generate(engine, [first], monkeypatch)
    heads = ready_heads(engine)
    (row,) = heads._ready
    generate(engine, [second], monkeypatch)
    assert list(heads._ready) == [row], "the first one keeps its place"
    monkeypatch.setattr(adapter_heads, "IDLE_CALLS", 1)
    generate(engine, [second], monkeypatch)
    assert len(heads) == 1
    assert row not in heads._ready


@pytest.mark.slow
def test_a_head_that_cannot_be_packed_is_tried_once_and_hinders_no_other_drafts(
    engines: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, without = engines("base", 2), engines("base")
    heads, tried = ready_heads(engine), list[int]()

    def fail(slot: HeadSlot, values: torch.Tensor) -> None:
        tried.append(len(values))
        raise torch.OutOfMemoryError

    monkeypatch.setattr(HeadSlot, "fill", fail)
    results = [
        generate(each, [None, each.add_adapter(folder / "with-first")], monkeypatch)
        for each in (engine, without)
    ]
    assert results[0] == results[1]
    assert (len(tried), len(heads)) == (1, 0)
    monkeypatch.undo()
    (row,) = engine.core.parts.tiers.arena.published
    heads.forget(row)
    generate(engine, [engine.add_adapter(folder / "with-first")], monkeypatch)
    assert len(heads) == 1, "it is tried again once it is loaded again"


def test_a_slot_whose_load_fails_halfway_is_empty_and_serves_the_next_adapter(
    engines: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, alone = engines("base", 1), engines("second")
    heads, (slot,) = ready_heads(engine), ready_heads(engine)._free
    with monkeypatch.context() as patch:
        patch.setattr(slot.head, "_as_one_call", Mock(side_effect=MemoryError))
        generate(engine, [engine.add_adapter(folder / "with-first")], monkeypatch)
    assert heads._free == [slot]
    assert not any(norm.any() for norm in slot.head.norms)
    assert not any(each.any() for linear in slot.head.linears for each in linear.buffers())
    drafts = [
        generate(each, [each.add_adapter(folder / "with-second")], monkeypatch)[1]
        for each in (engine, alone)
    ]
    assert (len(heads), drafts[0]) == (1, drafts[1])


def test_a_slot_is_another_adapters_right_after_an_eviction(
    engines: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, alone = engines("base", 1), engines("second")
    first, *others = (
        each.add_adapter(folder / f"with-{name}")
        for each, name in ((engine, "first"), (engine, "second"), (alone, "second"))
    )
    generate(engine, [first], monkeypatch)
    heads = ready_heads(engine)
    (slot,) = (each.slot for each in heads._ready.values())
    with monkeypatch.context() as patch:
        patch.setattr(heads, "_make_room", Mock(side_effect=AssertionError))
        engine.core.handle(DeleteAdapter(first, 0.0))
        results = [
            generate(each, [key], monkeypatch)
            for each, key in zip((engine, alone), others, strict=True)
        ]
    assert results[0] == results[1]
    assert [each.slot for each in heads._ready.values()] == [slot]


def test_weights_stay_in_place_when_a_dense_head_is_exchanged(
    tiny_base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured passes read fixed addresses. Nothing of the head before is left there."""
    monkeypatch.setattr(packed_head, "pack_linear", lambda weight, dtype: DenseLinear(weight))
    first, second = (load_head_for(tiny_base, folder / name).head for name in ("first", "second"))
    expected = PackedHead(second, LoadQuantization())
    slot = HeadSlot(outline(first), expected.fc, torch.float32)
    places = addresses(slot.head)
    slot.fill(values_of(first))
    slot.erase()
    assert not any(each.any() for each in tensors_of(slot.head))
    slot.fill(values_of(second))
    assert addresses(slot.head) == places
    pairs = zip(tensors_of(slot.head), tensors_of(expected), strict=True)
    assert all(torch.equal(actual, right) for actual, right in pairs)


def tensors_of(head: PackedHead) -> list[torch.Tensor]:
    return [*head.norms, *(each for linear in head.linears for each in linear.buffers())]


def addresses(head: PackedHead) -> list[int]:
    return [each.data_ptr() for each in tensors_of(head)]


def test_a_lease_finds_the_head_of_its_own_adapter_alone(
    engines: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("base", 2)
    first, second = (engine.add_adapter(folder / f"with-{name}") for name in ("first", "second"))
    generate(engine, [first], monkeypatch)
    heads, arena = ready_heads(engine), engine.core.parts.tiers.arena
    ((row, (key, generation)),) = arena.published.items()
    lease = Lease(key, "r", row, generation)
    assert heads.find(lease) is heads._ready[row].slot.head
    heads.forget(row)
    for stale in (lease._replace(generation=generation + 1), lease._replace(key=second)):
        assert heads.find(stale) is None
    assert len(heads) == 0
    assert heads.find(lease) is not None
    assert heads.find(lease._replace(key=second)) is None


def test_the_same_content_of_two_tenants_is_packed_for_each(
    engines: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("base", 2)
    keys = [engine.add_adapter(folder / "with-first", tenant) for tenant in ("acme", "globex")]
    generate(engine, keys, monkeypatch)
    heads = [ready.slot.head for ready in ready_heads(engine)._ready.values()]
    assert len(heads) == 2
    assert heads[0].norms.output.data_ptr() != heads[1].norms.output.data_ptr()


def test_room_for_heads_is_part_of_the_memory_plan(engines: Any) -> None:
    engine = engines("base")
    parts, head = engine.core.parts, packed(proposer_of(engine)._steps.head)
    loaded = load_eagle(parts.config, parts.base)
    assert loaded is not None
    without, with_three = (
        loaded.demand(replace(parts.config, adapter_draft_heads=number)) for number in (0, 3)
    )
    num_values = sum(linear.in_features * linear.out_features for linear in head.linears)
    num_values += sum(norm.numel() for norm in head.norms)
    assert with_three.reading_bytes - without.reading_bytes == 3 * 4 * num_values


def test_an_export_has_the_head_that_was_pushed(engines: Any, folder: Path, tmp_path: Path) -> None:
    engine = engines("base", 1)
    key = engine.add_adapter(folder / "with-first")
    (tmp_path / "out").mkdir()
    export_adapter(engine.paths[key], tmp_path / "out")
    pushed, exported = (
        load_file(path / "adapter_model.safetensors")
        for path in (folder / "with-first", tmp_path / "out")
    )
    assert pushed.keys() == exported.keys()
    assert all(torch.equal(pushed[name], exported[name]) for name in pushed)
    assert any(".draft_head." in name for name in exported)


def test_attaching_replaces_the_head_that_is_there(
    tiny_base: Path, folder: Path, tmp_path: Path
) -> None:
    foreign = load_head_for(tiny_base, folder / "foreign")
    attach_head(foreign, folder / "with-first", tmp_path)
    again, expected = (
        load_file(path / "adapter_model.safetensors") for path in (tmp_path, folder / "with-first")
    )
    (name,) = (name for name in again if ".draft_head." in name)
    assert name.endswith(foreign.head_id)
    assert len(again) == len(expected)
