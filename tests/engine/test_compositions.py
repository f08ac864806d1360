"""A composition of adapters equals PEFT's `add_weighted_adapter(combination_type="cat")`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from loraplex.adapters.identity import AdapterKey, composed_key
from loraplex.adapters.manager import Tier
from loraplex.engine.messages import AdapterFetched, DeleteAdapter, SpeculationParams
from support.canaries import run_canaries
from support.engine import LocalEngine
from support.families import SERVED, VOCAB_SIZE, save_family
from support.greedy import assert_greedy, load_dense
from support.models import make_adapter

pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")

TOLERANCE = 1e-4
PROMPT = list(range(50))
DRAFTS = SpeculationParams("ngram", 2)
FEATURES: dict[str, dict[str, Any]] = {
    "sql": {"r": 8, "lora_alpha": 4, "use_rslora": True},
    "polite": {"r": 4, "rank_pattern": {"q_proj": 16}, "alpha_pattern": {"v_proj": 32}},
    "short": {"r": 2, "target_modules": ["q_proj", "embed_tokens"]},
    "upper": {"r": 64, "target_modules": ["up_proj"], "layers_to_transform": [1]},
}
RECIPES: list[dict[str, float]] = [
    {"polite": 1.0, "sql": 1.0},
    {"polite": -0.5, "sql": 0.75},
    {"short": 1.5},
    {"polite": 1.0, "upper": 2.0},
    {"polite": 0.3, "sql": -2.0, "short": 1.0, "upper": 0.1},
    {"short": 1.0, "sql": 0.0},
]
"""PEFT gives the composition the rsLoRA and the layers of its first member, so none with these is
named first."""
SYSTEM_PROMPT = [7 * index % VOCAB_SIZE for index in range(40)]
"""Two full blocks and a half."""


@dataclass
class World:
    """A base, adapters of PEFT on it and the same ones in an engine."""

    engine: LocalEngine
    folders: Mapping[str, Path]
    keys: Mapping[str, AdapterKey]
    tuned: PeftModel

    def composed(self, recipe: Mapping[str, float], tenant_id: str = "acme") -> AdapterKey:
        weights = {self.keys[name].digest: weight for name, weight in recipe.items()}
        return composed_key(tenant_id, weights)

    def select(self, recipe: Mapping[str, float]) -> None:
        """Have PEFT's model compute this composition."""
        name = "_".join(recipe).replace(".", "-") + str(len(self.tuned.peft_config))
        self.tuned.add_weighted_adapter(
            list(recipe), list(recipe.values()), name, combination_type="cat"
        )
        self.tuned.set_adapter(name)

    def logits(self, prompt: list[int]) -> Tensor:
        """PEFT's, of the token behind the prompt."""
        with torch.inference_mode():
            found: Tensor = self.tuned(torch.tensor([prompt]), use_cache=False).logits[0, -1]
            return found


def make_world(path: Path, **config: object) -> World:
    model = save_family(path / "base", *SERVED["llama"])
    folders = {
        name: make_adapter(model, path / name, seed=index, scale=0.15, **lora)
        for index, (name, lora) in enumerate(FEATURES.items())
    }
    engine = LocalEngine(model, path, **config)
    keys = {name: engine.add_adapter(folder) for name, folder in folders.items()}
    (first, folder), *others = folders.items()
    tuned = PeftModel.from_pretrained(load_dense(model), folder, adapter_name=first).eval()
    for name, folder in others:
        tuned.load_adapter(folder, adapter_name=name)
    return World(engine, folders, keys, tuned)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    ends = [
        torch.randint(VOCAB_SIZE, (3 + index,), generator=generator)
        for index in range(len(RECIPES))
    ]
    return [[*SYSTEM_PROMPT, *end.tolist()] for end in ends]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = make_world(tmp_path_factory.mktemp("compositions"), speculation=("ngram",))
    yield made
    made.engine.close()


def test_every_composition_equals_peft_in_one_mixed_batch(world: World) -> None:
    """Beside their members and the base, first computed and then from the prefix cache."""
    engine = world.engine
    others = [None, *world.keys.values()]
    for cached in (False, True):
        ids = [
            engine.submit(
                prompt,
                world.composed(recipe),
                max_tokens=12,
                return_logits=True,
                speculation=DRAFTS,
            )
            for prompt, recipe in zip(prompts(), RECIPES, strict=True)
        ]
        for key in others:
            engine.submit(SYSTEM_PROMPT, key, max_tokens=12)
        engine.run()
        for request_id, prompt, recipe in zip(ids, prompts(), RECIPES, strict=True):
            answer = engine.answers[request_id]
            assert answer.end.error is None
            raw = answer.tokens[0].logits
            assert raw is not None, answer
            assert answer.started is not None
            assert bool(answer.started.num_cached_tokens) == cached
            world.select(recipe)
            served = torch.frombuffer(bytearray(raw), dtype=torch.float32)
            assert (served - world.logits(prompt)).abs().max() < TOLERANCE, recipe
            assert_greedy(world.tuned, prompt, answer.token_ids)
    assert engine.core.stats().num_step_sequences > engine.core.stats().num_steps


@pytest.mark.slow
def test_preempted_compositions_answer_as_peft_does(world: World, tmp_path: Path) -> None:
    """Every second request is of a tenant that comes when the other one holds all there is."""
    per_token = 4 * sum(
        shape.num_heads * sum(shape.stored_dims) for shape in world.engine.core.parts.base.kv_shapes
    )
    engine = LocalEngine(
        Path(world.engine.core.parts.config.model),
        tmp_path,
        kv_cache_bytes=240 * per_token,
        max_num_batched_tokens=64,
        max_num_seqs=6,
        max_model_len=128,
    )
    tenants = ("acme", "globex")
    for folder, tenant_id in product(world.folders.values(), tenants):
        engine.add_adapter(folder, tenant_id)
    for recipe, tenant_id in product(RECIPES, tenants):
        engine.generate([0], world.composed(recipe, tenant_id))
    ids = {}
    for tenant_id in tenants:
        for prompt, recipe in zip(prompts(), RECIPES, strict=True):
            key = world.composed(recipe, tenant_id)
            request_id = engine.submit(prompt, key, max_tokens=24, ignore_eos=True)
            ids[request_id] = prompt, recipe
        for _ in range(5):
            engine.step()
    engine.run()
    assert engine.core.parts.scheduler.num_preemptions
    for recipe in RECIPES:
        world.select(recipe)
        for request_id, (prompt, asked) in ids.items():
            if asked is recipe:
                assert_greedy(world.tuned, prompt, engine.answers[request_id].token_ids)
    engine.close()


def error_code(engine: LocalEngine, request_id: str) -> str | None:
    error = engine.answers[request_id].end.error
    return error.code if error else None


@pytest.fixture
def engine(tiny_base: Path, tmp_path: Path) -> Iterator[LocalEngine]:
    made = LocalEngine(tiny_base, tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def folders(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("members")
    return [make_adapter(tiny_base, root / str(r), seed=r, r=r) for r in (2, 4)]


def add(engine: LocalEngine, folders: list[Path], tenant_id: str = "acme") -> list[AdapterKey]:
    return [engine.add_adapter(folder, tenant_id) for folder in folders]


def compose(members: list[AdapterKey]) -> AdapterKey:
    return composed_key(members[0].tenant_id, {each.digest: 0.5 for each in members})


@pytest.mark.parametrize("index", [0, 1])
def test_with_a_member_its_compositions_are_deleted(
    engine: LocalEngine, folders: list[Path], index: int
) -> None:
    members = add(engine, folders)
    composition = compose(members)
    for key in (*members, composition):
        engine.generate(PROMPT, key)
    tiers, manager = engine.core.parts.tiers, engine.core.parts.tiers.manager
    before = tiers.arena.used_bytes
    own = {each.key: each.device_bytes for each in manager.reports.snapshot()}
    assert manager.compositions_of(members[index]) == {composition}
    engine.core.handle(DeleteAdapter(members[index]))
    engine.run()
    assert engine.evicted == [members[index]]
    (receipt,) = engine.receipts
    assert receipt.device_bytes == before - tiers.arena.used_bytes
    assert receipt.device_bytes == own[members[index]] + own[composition]
    assert manager.tier(composition) is manager.tier(members[index]) is Tier.STORE
    assert manager.tier(members[1 - index]) is Tier.DEVICE
    engine.broken.add(members[index])
    request_id = engine.submit(PROMPT, composition)
    engine.run()
    assert error_code(engine, request_id) == "adapter_load_failed"


def test_a_running_composition_drains_when_a_member_is_deleted(
    engine: LocalEngine, folders: list[Path]
) -> None:
    members = add(engine, folders)
    composition = compose(members)
    engine.generate(PROMPT, composition)
    running = engine.submit(PROMPT, composition, max_tokens=8, ignore_eos=True)
    while engine.answers[running].started is None:
        engine.step()
    engine.core.handle(DeleteAdapter(members[0], drain_seconds=60.0))
    late = engine.submit(PROMPT, composition)
    other = engine.submit(PROMPT, members[1])
    engine.run()
    assert (error_code(engine, running), error_code(engine, other)) == (None, None)
    assert error_code(engine, late) == "adapter_deleted"
    assert len(engine.answers[running].token_ids) == 8
    (receipt,) = engine.receipts
    assert (receipt.num_drained, receipt.num_aborted) == (1, 1)


@pytest.mark.slow
def test_a_deletion_ends_a_composition_that_is_being_fetched(
    engine: LocalEngine, folders: list[Path]
) -> None:
    members = add(engine, folders)
    waiting = engine.submit(PROMPT, compose(members))
    engine.core.step()  # the fetcher does not answer
    engine.core.handle(DeleteAdapter(members[1]))
    engine.core.handle(
        AdapterFetched(
            compose(members), tuple(str(engine.paths[each]) for each in members), Tier.DISK
        )
    )
    engine.run()
    assert error_code(engine, waiting) == "adapter_deleted"
    assert engine.core.parts.tiers.host.used_bytes == 0


def test_an_adapter_with_more_than_matrices_is_not_composed(
    engine: LocalEngine, folders: list[Path], tiny_base: Path, tmp_path: Path
) -> None:
    dora = engine.add_adapter(
        make_adapter(tiny_base, tmp_path / "dora", seed=5, use_dora=True, target_modules=["q_proj"])
    )
    plain, _ = add(engine, folders)
    refused = engine.submit(PROMPT, compose([plain, dora]))
    served = [engine.submit(PROMPT, key) for key in (plain, dora)]
    engine.run()
    assert error_code(engine, refused) == "adapter_not_composable"
    assert [error_code(engine, each) for each in served] == [None, None]


def test_compositions_share_no_prefix_with_their_members_or_other_weights(
    engine: LocalEngine, folders: list[Path]
) -> None:
    members = add(engine, folders)
    first, second = (each.digest for each in members)
    keys = [
        *members,
        composed_key("acme", {first: 1.0, second: 0.5}),
        composed_key("acme", {first: 0.5, second: 1.0}),
        composed_key("acme", {first: 1.0}),
    ]
    for key in keys[:-1]:
        request_id = engine.submit(PROMPT, key)
        engine.run()
        started = engine.answers[request_id].started
        assert started is not None
        assert started.num_cached_tokens == 0
    request_id = engine.submit(PROMPT, keys[-1])
    engine.run()
    started = engine.answers[request_id].started
    assert started is not None
    assert started.num_cached_tokens > 0, "with weight 1 it is the adapter itself"


@pytest.mark.slow
def test_no_canary_crosses_through_a_composition() -> None:
    found = run_canaries(150, seed=0, composes=True)
    assert found["foreign"] == 0
    assert found["evictions"] > 0
    assert found["deleted"] > 0
