"""Activated LoRA equals PEFT however it is served, and shares the base's KV before its start."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.core import EngineCore
from loraplex.engine.messages import SpeculationParams
from loraplex.engine.scheduling.step_costs import StepCosts
from support.activated import MIN_EFFECT, TOLERANCE, Reference, make_activated
from support.engine import Answer, LocalEngine
from support.families import SERVED, STATES, save_family
from support.models import make_adapter
from support.ranks import followers_as_threads

# PEFT saves a copy of the head, which intake leaves out.
pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
BLOCK = 16
MIB = 1 << 20
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
"""Of two layers: keys and values of two heads of 16 floats."""
MAX_TOKENS = 6
NUM_TOP = 5
INVOCATIONS = ((90, 91, 92), (70,))
TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "down_proj", "lm_head"],
    "qwen3_next": ["q_proj", "k_proj", "in_proj_qkvz", "out_proj", "lm_head"],
}
CONTEXT = [7 * index % 60 + 3 for index in range(45)]
"""Two full blocks and 13 tokens; none of them is an invocation's."""


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    folder: Path | None


@dataclass(frozen=True)
class World:
    """A base, two activated adapters and a plain one, and what PEFT makes of them."""

    base: Path
    activated: list[Path]
    plain: Path
    reference: Reference

    @property
    def folders(self) -> list[Path]:
        return [*self.activated, self.plain]

    def cases(self) -> list[Case]:
        """Invocations at many places, twice, at either end, cut short, of another adapter, none."""
        rng = random.Random(5)
        cases = [Case([*CONTEXT, 5], None), Case([*CONTEXT, 6], self.plain)]
        for folder, invocation in zip(self.activated, INVOCATIONS, strict=True):
            other = INVOCATIONS[folder is self.activated[0]]
            prompts = [
                [*CONTEXT, *invocation],
                [*invocation, *CONTEXT],
                [*CONTEXT[:31], *invocation, *CONTEXT[31:], *invocation, 8, 9],
                [*CONTEXT[:32], *invocation, *CONTEXT[32:]],
                [*CONTEXT, *other, 4],
                [*CONTEXT[:20], *invocation[:-1], 5],
            ]
            drawn = [rng.choices(range(3, 60), k=rng.randint(1, 50)) for _ in range(4)]
            prompts += [[*head, *invocation, *head[: len(head) % 7]] for head in drawn]
            cases += [Case(prompt, folder) for prompt in prompts]
        return cases


def make_world(family: str, root: Path) -> World:
    model_type, differences = {**SERVED, **STATES}[family]
    base = save_family(root / "base", model_type, {**differences, "tie_word_embeddings": False})
    targets = TARGETS[family]
    activated = [
        make_activated(base, root / str(tokens[0]), tokens, seed=seed, target_modules=targets)
        for seed, tokens in enumerate(INVOCATIONS)
    ]
    plain = make_adapter(base, root / "plain", seed=9, target_modules=targets)
    return World(base, activated, plain, Reference.of(base, [*activated, plain]))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world("llama", tmp_path_factory.mktemp("llama"))


@dataclass
class Served:
    """An engine with the adapters of a world, for tenants."""

    engine: LocalEngine
    keys: dict[tuple[Path, str], AdapterKey]

    @classmethod
    def of(cls, world: World, directory: Path, **config: object) -> Served:
        engine = LocalEngine(world.base, directory, **config)
        keys = {
            (folder, tenant): engine.add_adapter(folder, tenant)
            for folder in world.folders
            for tenant in ("acme", "globex")
        }
        return cls(engine, keys)

    def submit(self, case: Case, tenant: str = "acme", **settings: Any) -> str:
        settings = {"max_tokens": MAX_TOKENS, "num_logprobs": NUM_TOP, **settings}
        key = self.keys[case.folder, tenant] if case.folder else None
        return self.engine.submit(case.prompt, key, tenant_id=tenant, ignore_eos=True, **settings)

    def ask(self, case: Case, tenant: str = "acme", **settings: Any) -> Answer:
        """The answer to a request that runs alone."""
        name = self.submit(case, tenant, **settings)
        self.engine.run()
        return self.engine.answers[name]

    def num_cached(self, case: Case, tenant: str = "acme") -> int:
        started = self.ask(case, tenant).started
        assert started is not None
        return started.num_cached_tokens


@pytest.fixture
def served(world: World, tmp_path: Path) -> Iterator[Served]:
    opened = Served.of(world, tmp_path)
    yield opened
    opened.engine.close()


def check(world: World, case: Case, answer: Answer) -> None:
    """Each token's log-probability, and those of the most likely ones, are PEFT's."""
    assert len(answer.token_ids) == MAX_TOKENS
    expected = world.reference.logprobs(case.folder, case.prompt, answer.token_ids)
    for row, entry, token in zip(expected, answer.logprobs, answer.token_ids, strict=True):
        for found in (entry.chosen, *entry.top):
            assert abs(found.logprob - row[found.token_id].item()) < TOLERANCE
        assert row.max() - row[token] < TOLERANCE


def serve_all(served: Served, cases: list[Case], **settings: Any) -> list[Answer]:
    """All at once, the later ones while the first run."""
    names = []
    for index, case in enumerate(cases):
        names.append(served.submit(case, **settings))
        if index % 4 == 3:
            served.engine.step()
    served.engine.run()
    return [served.engine.answers[name] for name in names]


def serve_twice(served: Served, cases: list[Case], **settings: Any) -> list[Answer]:
    serve_all(served, cases, **settings)
    return serve_all(served, cases, **settings)


def serve_rivals(served: Served, cases: list[Case], **settings: Any) -> list[Answer]:
    """Every second case is of a tenant that comes when the other one holds all there is."""
    for folder, tenant in served.keys:
        served.ask(Case([3], folder), tenant)
    names: dict[int, str] = {}
    for first, tenant in enumerate(("acme", "globex")):
        for index in range(first, len(cases), 2):
            names[index] = served.submit(cases[index], tenant, **settings)
        for _ in range(5):
            served.engine.step()
    served.engine.run()
    return [served.engine.answers[names[index]] for index in range(len(cases))]


@dataclass(frozen=True)
class Way:
    """A way to serve the cases, and the sign that it was that way."""

    config: dict[str, object]
    happened: Callable[[EngineCore, list[Answer]], bool]
    serve: Callable[..., list[Answer]] = serve_all
    speculation: SpeculationParams | None = None


SMALL: dict[str, object] = {
    "max_num_batched_tokens": 64,
    "max_num_seqs": 6,
    "max_model_len": 128,
    "kv_cache_bytes": 240 * KV_BYTES_PER_TOKEN,
}
WAYS = {
    "batched": Way(
        {"prefix_caching": False, "max_num_batched_tokens": 2048},
        lambda core, _: core.stats().num_step_sequences > 3 * core.stats().num_steps,
    ),
    "chunked": Way(
        {"prefix_caching": False, "max_num_batched_tokens": 17, "max_num_seqs": 12},
        lambda core, _: core.stats().num_steps > 40,
    ),
    "prefix-hit": Way(
        {"max_num_batched_tokens": 64, "max_num_seqs": 12},
        lambda core, _: core.stats().num_cached_tokens > 20 * BLOCK,
        serve=serve_twice,
    ),
    "recomputed": Way(
        SMALL,
        lambda core, _: core.parts.scheduler.num_preemptions > core.parts.scheduler.num_swaps,
        serve=serve_rivals,
    ),
    "swapped": Way(
        {**SMALL, "swap_bytes": 4 * MIB},
        lambda core, _: core.parts.scheduler.num_swaps > 0,
        serve=serve_rivals,
    ),
    "from the host": Way(
        {**SMALL, "swap_bytes": 4 * MIB, "max_num_seqs": 2},
        lambda core, _: core.parts.kv.num_fetched_tokens > 10 * BLOCK,
        serve=serve_twice,
    ),
    "two steps in flight": Way(
        {"async_scheduling": True, "max_num_batched_tokens": 40, "max_num_seqs": 16},
        lambda core, _: core.stats().num_steps > 10,
    ),
    "ngram drafts": Way(
        {"speculation": ("ngram",)},
        lambda _core, answers: sum(answer.end.num_draft_tokens for answer in answers) > 0,
        speculation=SpeculationParams("ngram", 3),
    ),
    "early exit drafts": Way(
        {"speculation": ("early_exit:1",)},
        lambda _core, answers: sum(answer.end.num_draft_tokens for answer in answers) > 0,
        speculation=SpeculationParams("early_exit", 3),
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_every_answer_is_that_of_peft(
    name: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCosts, "swap_seconds", lambda *_: 0.0)  # whatever was measured
    way = WAYS[name]
    served, cases = Served.of(world, tmp_path, **way.config), world.cases()

    answers = way.serve(served, cases, speculation=way.speculation)

    for case, answer in zip(cases, answers, strict=True):
        check(world, case, answer)
    assert way.happened(served.engine.core, answers), (
        f"nothing was {name}: {served.engine.core.stats()}"
    )
    served.engine.close()


def test_adapters_without_activation_would_answer_otherwise(world: World) -> None:
    """Else equal figures would say nothing about the start."""
    for folder, invocation in zip(world.activated, INVOCATIONS, strict=True):
        prompt = [*CONTEXT, *invocation]
        tuned, plain = (world.reference.logprobs(each, prompt, [5]) for each in (folder, None))
        assert (tuned - plain).abs().max() > MIN_EFFECT
        absent = [world.reference.logprobs(each, CONTEXT, [5]) for each in (folder, None)]
        assert (absent[0] - absent[1]).abs().max() == 0


@pytest.mark.slow
@pytest.mark.parametrize("place", [-1, 0, 1, 2, 3], ids="{:+d}".format)
def test_a_chunk_may_end_anywhere_about_the_invocation(
    place: int, world: World, tmp_path: Path
) -> None:
    """`place`: of the end of the first chunk, after the invocation's first token."""
    num_before = 24
    budget = num_before + place
    served = Served.of(
        world, tmp_path, max_num_batched_tokens=budget, max_num_seqs=4, prefix_caching=False
    )
    case = Case([*CONTEXT[:num_before], *INVOCATIONS[0], 5, 6, 7], world.activated[0])
    check(world, case, served.ask(case))
    assert served.engine.core.stats().num_steps >= 2 + MAX_TOKENS - 1
    served.engine.close()


@pytest.mark.slow
def test_prompt_logprobs_are_those_of_peft_on_both_sides_of_the_start(
    world: World, served: Served
) -> None:
    folder, prompt = world.activated[0], [*CONTEXT[:9], *INVOCATIONS[0], 5, 6]
    answer = served.ask(Case(prompt, folder), num_prompt_logprobs=0, max_tokens=1)
    found = [entry.chosen.logprob for part in answer.prompts for entry in part.logprobs or ()]
    model = world.reference.models[folder]
    logits = model(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    expected = logits[range(len(prompt) - 1), prompt[1:]]
    torch.testing.assert_close(torch.tensor(found), expected.detach(), atol=TOLERANCE, rtol=0)


# --- whose blocks are shared ----------------------------------------------------------------------


def test_adapters_and_base_share_what_is_before_the_invocation(
    world: World, served: Served
) -> None:
    first, second = (
        Case([*CONTEXT, *invocation, 8], folder)
        for folder, invocation in zip(world.activated, INVOCATIONS, strict=True)
    )
    assert served.num_cached(first) == 0
    assert served.num_cached(second) == 2 * BLOCK
    assert served.num_cached(Case([*CONTEXT, 8], None)) == 2 * BLOCK
    assert served.num_cached(Case([*CONTEXT, *INVOCATIONS[0], 8], world.plain)) == 0


def test_the_base_leaves_its_blocks_to_adapters(world: World, served: Served) -> None:
    served.ask(Case([*CONTEXT, 8], None))
    case = Case([*CONTEXT, *INVOCATIONS[0], 8], world.activated[0])
    answer = served.ask(case)
    assert answer.started is not None
    assert answer.started.num_cached_tokens == 2 * BLOCK
    check(world, case, answer)


def test_the_block_with_the_invocation_and_those_after_it_are_the_adapters(
    world: World, served: Served
) -> None:
    tokens = [*CONTEXT[:36], *INVOCATIONS[0], *CONTEXT]
    case = Case(tokens, world.activated[0])
    num_full = (len(tokens) - 1) // BLOCK * BLOCK
    served.ask(case)
    assert served.num_cached(case) == num_full
    assert served.num_cached(Case(tokens, None)) == 2 * BLOCK
    assert served.num_cached(case) == num_full, "the base's blocks replace none of the adapter's"


def test_an_invocation_at_the_start_of_a_block_leaves_the_block_before_to_the_base(
    world: World, served: Served
) -> None:
    served.ask(Case([*CONTEXT[:32], *INVOCATIONS[0], *CONTEXT], world.activated[0]))
    assert served.num_cached(Case([*CONTEXT[:32], 4, 5], None)) == 2 * BLOCK


def test_a_prompt_without_invocation_is_the_bases(world: World, served: Served) -> None:
    case = Case([*CONTEXT, 8], world.activated[0])
    check(world, case, served.ask(case))
    assert served.num_cached(Case([*CONTEXT, 8], None)) == 2 * BLOCK


def test_equal_tokens_with_another_start_are_not_shared(world: World, served: Served) -> None:
    """An invocation that the model said is none, until it is part of a prompt."""
    folder, invocation = world.activated[0], list(INVOCATIONS[0])
    prompt = [*CONTEXT[:18], *invocation, 7]
    bias = dict.fromkeys((*invocation, 7), 100.0)
    said = served.ask(Case(prompt, folder), logit_bias=bias, max_tokens=24).token_ids
    assert invocation[0] in said
    for length in range(len(prompt) + 8, len(prompt) + len(said)):
        case = Case([*prompt, *said[:8], *invocation, *said[8:][: length % 9]], folder)
        check(world, case, served.ask(case))


def test_no_tenant_shares_with_another(world: World, served: Served) -> None:
    case = Case([*CONTEXT, *INVOCATIONS[0], 8], world.activated[0])
    served.ask(case, "acme")
    assert served.num_cached(case, "globex") == 0
    assert served.num_cached(case, "globex") == 3 * BLOCK


def test_an_agent_that_switches_adapters_pays_for_its_context_once(
    world: World, served: Served
) -> None:
    """Each turn appends the invocation of another adapter, and its answer."""
    conversation = [*CONTEXT, *CONTEXT]
    num_computed = 0
    for turn in range(6):
        folder, invocation = world.activated[turn % 2], INVOCATIONS[turn % 2]
        case = Case([*conversation, *invocation], folder)
        answer = served.ask(case)
        check(world, case, answer)
        assert answer.started is not None
        num_computed += len(case.prompt) - answer.started.num_cached_tokens
        conversation = [*case.prompt, *answer.token_ids]
    assert num_computed < len(conversation) + 6 * 2 * BLOCK


# --- devices and layers ---------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_serve_what_one_rank_serves(world: World, tmp_path: Path) -> None:
    with followers_as_threads():
        served = Served.of(world, tmp_path, tensor_parallel_size=2, max_num_seqs=12)
        cases = world.cases()
        for case, answer in zip(cases, serve_twice(served, cases), strict=True):
            check(world, case, answer)
        served.engine.close()


@pytest.mark.slow
def test_layers_with_states_go_on_from_the_bases(tmp_path: Path) -> None:
    world = make_world("qwen3_next", tmp_path)
    served, cases = Served.of(world, tmp_path, kv_block_size=BLOCK), world.cases()
    for case, answer in zip(cases, serve_twice(served, cases), strict=True):
        check(world, case, answer)
    assert served.engine.core.stats().num_cached_tokens > 0
    served.engine.close()
