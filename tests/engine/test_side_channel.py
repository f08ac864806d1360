"""A tenant's view of the prefix cache never depends on another tenant's requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from loraplex.adapters.identity import AdapterKey
from support.engine import LocalEngine
from support.models import make_adapter

NUM_PAIRS = 16
"""Of each kind."""
MIB = 1 << 20


@dataclass(frozen=True)
class Asker:
    """Who asks, in everything that separates prefix caches."""

    tenant_id: str
    adapter: AdapterKey | None = None
    cache_namespace: str = ""


@pytest.fixture(scope="module")
def folders(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(tiny_base, root / f"{seed}", seed=seed) for seed in range(2)]


@pytest.fixture
def engine(tiny_base: Path, tmp_path: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(tiny_base, tmp_path, kv_cache_bytes=8 * MIB)
    yield engine
    engine.close()


def submit(
    engine: LocalEngine, asker: Asker, prompt: list[int], *, group_id: str | None = None
) -> str:
    return engine.submit(
        prompt,
        asker.adapter,
        tenant_id=asker.tenant_id,
        cache_namespace=asker.cache_namespace,
        group_id=group_id,
        max_tokens=2,
        ignore_eos=True,
    )


def num_cached(engine: LocalEngine, request_id: str) -> int:
    started = engine.answers[request_id].started
    assert started is not None
    return started.num_cached_tokens


def num_cached_by_turns(
    engine: LocalEngine, first: Asker, second: Asker, prompt: list[int]
) -> tuple[int, int]:
    """What each is told, the second asking once the first is answered."""
    told = []
    for asker in (first, second):
        request_id = submit(engine, asker, prompt)
        engine.run()
        told.append(num_cached(engine, request_id))
    return told[0], told[1]


def prompts(rng: random.Random) -> Iterator[list[int]]:
    for _ in range(NUM_PAIRS):
        yield [rng.randrange(256) for _ in range(rng.randint(17, 100))]


@pytest.mark.parametrize(
    "difference",
    ["tenant", "tenant with the same adapter", "adapter", "base instead of adapter", "label"],
)
def test_who_differs_in_one_field_is_told_of_no_cached_token(
    difference: str, engine: LocalEngine, folders: list[Path]
) -> None:
    mine = Asker("acme", engine.add_adapter(folders[0]))
    other = {
        "tenant": Asker("globex"),
        "tenant with the same adapter": Asker("globex", engine.add_adapter(folders[0], "globex")),
        "adapter": replace(mine, adapter=engine.add_adapter(folders[1])),
        "base instead of adapter": Asker("acme"),
        "label": replace(mine, cache_namespace="probe"),
    }[difference]
    if difference == "tenant":
        mine = Asker("acme")

    told = [
        num_cached_by_turns(engine, mine, other, prompt) for prompt in prompts(random.Random(1))
    ]

    assert told == [(0, 0)] * NUM_PAIRS


def test_the_same_asker_is_told_of_all_full_blocks_but_the_last_token(engine: LocalEngine) -> None:
    """Else nothing cached would prove nothing."""
    mine = Asker("acme")
    for prompt in prompts(random.Random(2)):
        assert num_cached_by_turns(engine, mine, mine, prompt) == (0, (len(prompt) - 1) // 16 * 16)


def test_a_spy_beside_a_running_request_is_told_nothing(engine: LocalEngine) -> None:
    """In the same step, while the other decodes, and after it was aborted or ended."""
    owner, spy = Asker("acme"), Asker("globex")
    for prompt in prompts(random.Random(3)):
        asked = [submit(engine, owner, prompt), submit(engine, spy, prompt)]
        engine.step()
        asked.append(submit(engine, spy, [*prompt, 1]))
        engine.run()
        asked.append(submit(engine, owner, [*prompt, 2]))
        engine.run()
        told = [num_cached(engine, request_id) for request_id in asked]
        assert told[0] == told[1] == 0, "nobody asked this before"
        # The spy may find its own earlier question, as the owner does, and no more than that.
        assert told[2] <= len(prompt) // 16 * 16
        assert told[3] == len(prompt) // 16 * 16


def test_what_a_tenant_is_told_is_the_same_with_and_without_others(
    tiny_base: Path, tmp_path: Path
) -> None:
    """The same questions in the same order, on an engine of one's own and beside other tenants
    that ask the same prompts first."""

    def told(*, others: list[str]) -> list[int]:
        engine = LocalEngine(tiny_base, tmp_path, kv_cache_bytes=8 * MIB)
        rng = random.Random(4)
        counts = []
        known = list(prompts(rng))[:10]
        for _ in range(NUM_PAIRS):
            prompt = [*rng.choice(known)[: rng.randint(1, 100)], rng.randrange(256)]
            for tenant_id in others:
                submit(engine, Asker(tenant_id), prompt)
                engine.run()
            request_id = submit(engine, Asker("acme"), prompt)
            engine.run()
            counts.append(num_cached(engine, request_id))
        engine.close()
        return counts

    alone = told(others=[])
    assert sum(alone) > 0, "nothing to tell apart"
    assert told(others=["globex", "initech"]) == alone


def test_a_group_id_in_use_by_another_tenant_opens_nothing(engine: LocalEngine) -> None:
    """Group ids are the API's own; the engine does not lean on that."""
    rng = random.Random(5)
    for index, prompt in enumerate(prompts(rng)):
        mine = submit(engine, Asker("acme"), prompt, group_id=f"g{index}")
        spy = submit(engine, Asker("globex"), prompt, group_id=f"g{index}")
        draft_token = submit(engine, Asker("globex"), [1, *prompt[1:]], group_id=f"g{index}")
        engine.run()
        assert [num_cached(engine, request_id) for request_id in (mine, spy)] == [0, 0]
        alone = submit(engine, Asker("initech"), [1, *prompt[1:]])
        engine.run()
        assert engine.answers[draft_token].token_ids == engine.answers[alone].token_ids
