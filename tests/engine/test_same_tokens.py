"""The same request gives the same greedy tokens, however it is served.

The reference is the request alone, without any cache. The other ways differ in the batch, in the
chunks of a prompt, and in the origin of its keys and values. The families differ in attention
(windows, sinks, latent) and in layers (experts, fused projections, Conv1D), each with the base and
two adapters. `make base-evidence` serves crowds of every family.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from types import MappingProxyType

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.config import EngineConfig
from loraplex.engine.core import EngineCore
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.scheduling.step_costs import StepCosts
from support.engine import LocalEngine
from support.families import SERVED, VOCAB_SIZE, save_family
from support.greedy import parts_at_near_tie
from support.marks import marked_slow
from support.models import make_adapter
from support.quantized_checkpoints import ENDS, FORMATS, write_checkpoint

NEAR_TIE = 1e-4
"""Logit gap, fp32, that another order of summation may cross."""
MAX_NEAR_TIES = 1
"""Of the cases of one family served in one way."""
NUM_CHOICES = 3
TENANTS = ("acme", "globex")
MIB = 1 << 20
SYSTEM_PROMPT = [7 * index % VOCAB_SIZE for index in range(40)]
"""Two full blocks and a half: longer than every family's window."""
FAMILIES: dict[str, list[str]] = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt_oss-sinks-window": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "deepseek_v2-mla": ["q_proj", "kv_a_proj_with_mqa", "o_proj"],
    "phi3-fused": ["qkv_proj", "gate_up_proj"],
    "gpt2-conv1d": ["c_attn", "c_fc"],
}
"""Which layers of each family the adapters change."""
QUANTIZED = {
    "llama gptq-ordered": "gptq-ordered",
    "qwen3_moe ct-int4-asymmetric": "ct-int4-asymmetric",
    "deepseek_v2-mla nf4-nested": "nf4-nested",
    "phi3-fused deepseek-fp8": "deepseek-fp8",
}
"""A family and the format of its checkpoint, its embedding and output head included."""
SLOW_FAMILIES = {*FAMILIES, *QUANTIZED} - {
    "gpt_oss-sinks-window",
    "deepseek_v2-mla",
}
"""Families whose attention and layers another one, or another test of the engine, has too."""
UNTIED = {"tie_word_embeddings": False}
"""A random model with tied embeddings repeats its last token, whatever its cache says."""


@dataclass(frozen=True)
class Case:
    """One request and the tokens it gives alone."""

    prompt: list[int]
    adapter: AdapterKey | None
    max_tokens: int
    expected: list[int]


@dataclass(frozen=True)
class Family:
    """A model with its adapters, and an engine that serves one request at a time, cacheless."""

    model: Path
    kv_bytes_per_token: int
    adapters: list[Path]
    alone: LocalEngine
    cases: list[Case]


@pytest.fixture(
    scope="module",
    params=marked_slow([*FAMILIES, *QUANTIZED], slow=SLOW_FAMILIES),
)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    root = tmp_path_factory.mktemp("family")
    name = request.param.partition(" ")[0]
    model_type, differences = SERVED[name]
    model = dense = save_family(root / "base", model_type, {**differences, **UNTIED})
    if request.param in QUANTIZED:
        form = FORMATS[QUANTIZED[request.param]]
        model = write_checkpoint(dense, root / "packed", form, ends=ENDS)
    adapters = [
        make_adapter(
            dense,
            root / f"rank-{rank}",
            seed=rank,
            r=rank,
            target_modules=FAMILIES[name],
            fan_in_fan_out=name == "gpt2-conv1d",
        )
        for rank in (3, 8)
    ]
    alone = LocalEngine(model, root, max_num_seqs=1, prefix_caching=False)
    cases = make_cases(alone, [alone.add_adapter(folder) for folder in adapters])
    yield Family(model, kv_bytes_per_token(model), adapters, alone, cases)
    alone.close()


def kv_bytes_per_token(model: Path) -> int:
    base = load_base_model(EngineConfig(str(model), device="cpu"))
    per_layer = [shape.num_heads * sum(shape.stored_dims) for shape in base.kv_shapes]
    return sum(per_layer) * base.dtype.itemsize


def make_cases(alone: LocalEngine, keys: list[AdapterKey]) -> list[Case]:
    rng = random.Random(3)
    cases = []
    for index in range(12):
        prompt = SYSTEM_PROMPT if index % 2 else []
        prompt = prompt + rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 50))
        adapter = [None, *keys][index % 3]
        max_tokens = rng.randint(6, 30)
        expected = serve(alone, prompt, adapter, max_tokens)
        assert len(expected) == max_tokens
        cases.append(Case(prompt, adapter, max_tokens, expected))
    return cases


def serve(
    engine: LocalEngine,
    prompt: list[int],
    adapter: AdapterKey | None,
    max_tokens: int,
    logit_bias: Mapping[int, float] = MappingProxyType({}),
) -> list[int]:
    request_id = engine.submit(
        prompt, adapter, max_tokens=max_tokens, ignore_eos=True, logit_bias=logit_bias
    )
    engine.run()
    return engine.answers[request_id].token_ids


def submit(engine: LocalEngine, case: Case, tenant_id: str = "acme") -> str:
    adapter = AdapterKey(tenant_id, case.adapter.digest) if case.adapter else None
    return engine.submit(
        case.prompt, adapter, tenant_id=tenant_id, max_tokens=case.max_tokens, ignore_eos=True
    )


def serve_together(engine: LocalEngine, cases: list[Case]) -> list[list[int]]:
    """All cases, some of them submitted while others run."""
    ids = []
    for index, case in enumerate(cases):
        ids.append(submit(engine, case))
        if index % 4 == 3:
            engine.step()
    engine.run()
    return engine.tokens(ids)


def serve_loaded(engine: LocalEngine, cases: list[Case]) -> list[list[int]]:
    """All cases, none of which waits for its adapter."""
    engine.load_adapters()
    return serve_together(engine, cases)


def serve_twice(engine: LocalEngine, cases: list[Case]) -> list[list[int]]:
    """The second time every prompt is in the prefix cache."""
    serve_together(engine, cases)
    return serve_together(engine, cases)


def serve_rivals(engine: LocalEngine, cases: list[Case]) -> list[list[int]]:
    """Every second case is of a tenant that comes when the other one holds all there is."""
    engine.load_adapters()  # who waits for its adapter waits for nobody's room
    ids: dict[int, str] = {}
    for first, tenant_id in enumerate(TENANTS):
        for index in range(first, len(cases), len(TENANTS)):
            ids[index] = submit(engine, cases[index], tenant_id)
        for _ in range(5):
            engine.step()
    engine.run()
    return engine.tokens(ids[index] for index in range(len(cases)))


@dataclass(frozen=True)
class Way:
    """A way to serve the cases, and the sign that it was that way."""

    config: dict[str, object]
    happened: Callable[[EngineCore], bool]
    serve: Callable[[LocalEngine, list[Case]], list[list[int]]] = serve_together
    num_kv_tokens: int | None = None
    """What the KV cache holds; None: more than enough."""
    num_swap_tokens: int | None = None
    """What the host slots hold; None: as configured."""
    is_restarted: bool = False
    """Whether another engine on the same disk has served the cases before."""


WAYS = {
    "batched": Way(
        {"prefix_caching": False, "max_num_batched_tokens": 2048},
        lambda core: core.stats().num_step_sequences > 3 * core.stats().num_steps,
        serve=serve_loaded,
    ),
    "chunked": Way(
        {"prefix_caching": False, "max_num_batched_tokens": 23, "max_num_seqs": 12},
        lambda core: core.stats().num_steps > 40,
    ),
    "prefix-hit": Way(
        {"max_num_batched_tokens": 64, "max_num_seqs": 12},
        lambda core: core.stats().num_cached_tokens > 12 * 16,
        serve=serve_twice,
    ),
    "recomputed": Way(
        {"max_num_batched_tokens": 64, "max_num_seqs": 6, "max_model_len": 128},
        lambda core: core.parts.scheduler.num_preemptions > core.parts.scheduler.num_swaps,
        serve=serve_rivals,
        num_kv_tokens=240,
    ),
    "swapped": Way(
        {
            "max_num_batched_tokens": 64,
            "max_num_seqs": 6,
            "max_model_len": 128,
            "swap_bytes": 4 * MIB,
        },
        lambda core: core.parts.scheduler.num_swaps > 0,
        serve=serve_rivals,
        num_kv_tokens=240,
    ),
    "from the host": Way(
        {
            "max_num_batched_tokens": 64,
            "max_num_seqs": 2,
            "max_model_len": 128,
            "swap_bytes": 4 * MIB,
        },
        lambda core: core.parts.kv.num_fetched_tokens > 12 * 16,
        serve=serve_twice,
        num_kv_tokens=240,
    ),
    "from the disk": Way(
        {
            "max_num_batched_tokens": 64,
            "max_num_seqs": 2,
            "max_model_len": 128,
            "prefix_disk_bytes": 16 * MIB,
        },
        lambda core: core.stats().num_blocks_from_disk > 4,
        serve=serve_twice,
        num_kv_tokens=240,
        num_swap_tokens=240,
    ),
    "after a restart": Way(
        {"max_num_batched_tokens": 64, "max_num_seqs": 2, "prefix_disk_bytes": 16 * MIB},
        lambda core: core.stats().num_blocks_from_disk > 12,
        num_swap_tokens=1200,
        is_restarted=True,
    ),
}


def make_engine(family: Family, directory: Path, way: Way) -> LocalEngine:
    config = dict(way.config)
    if way.num_kv_tokens is not None:
        config["kv_cache_bytes"] = way.num_kv_tokens * family.kv_bytes_per_token
    if way.num_swap_tokens is not None:
        config["swap_bytes"] = way.num_swap_tokens * family.kv_bytes_per_token
    if "prefix_disk_bytes" in config:
        config |= {"prefix_disk_dir": str(directory / "prefixes"), "prefix_key": bytes(32)}
    engine = LocalEngine(family.model, directory, **config)
    for folder, tenant_id in product(family.adapters, TENANTS):
        engine.add_adapter(folder, tenant_id)
    return engine


def check_tokens(family: Family, cases: list[Case], actual: list[list[int]]) -> None:
    differing = [
        (case, tokens)
        for case, tokens in zip(cases, actual, strict=True)
        if tokens != case.expected
    ]
    for case, tokens in differing:
        assert parts_at_near_tie(
            family.alone,
            case.prompt,
            case.adapter,
            expected=case.expected,
            actual=tokens,
            gap=NEAR_TIE,
        )
    assert len(differing) <= MAX_NEAR_TIES


@pytest.mark.parametrize("name", WAYS)
def test_the_tokens_are_those_of_the_request_alone(
    name: str, family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCosts, "swap_seconds", lambda *_: 0.0)  # whatever was measured
    monkeypatch.setattr(StepCosts, "read_seconds", lambda *_: 0.0)
    way = WAYS[name]
    engine = make_engine(family, tmp_path, way)
    if way.is_restarted:
        way.serve(engine, family.cases)
        engine.close()
        engine = make_engine(family, tmp_path, way)

    actual = way.serve(engine, family.cases)

    check_tokens(family, family.cases, actual)
    assert way.happened(engine.core), f"nothing was {name}: {engine.core.stats()}"
    engine.close()


def test_an_adapter_changes_what_is_said(family: Family) -> None:
    """Else equal tokens would say nothing about adapters."""
    adapters = dict.fromkeys(case.adapter for case in family.cases)
    answers = {
        adapter: [serve(family.alone, case.prompt, adapter, 8) for case in family.cases[:2]]
        for adapter in adapters
    }
    assert all(answers[a] != answers[b] for a, b in combinations(answers, 2))


def test_choices_that_share_a_prompt_are_those_of_requests_alone(
    family: Family, tmp_path: Path
) -> None:
    """`n > 1`: the prompt is computed once, and each choice writes behind it for itself.

    Greedy choices would write the same, so each is denied the first tokens of those before it.
    """
    engine = LocalEngine(family.model, tmp_path, max_num_batched_tokens=64, max_num_seqs=12)
    for folder in family.adapters:
        engine.add_adapter(folder)
    cases = [case for case in family.cases if len(case.prompt) % 16][:3]
    expected = {}
    for group, case in enumerate(cases):
        denied: dict[int, float] = {}
        for _ in range(NUM_CHOICES):
            answer = serve(family.alone, case.prompt, case.adapter, 12, logit_bias=denied)
            choice = engine.submit(
                case.prompt,
                case.adapter,
                group_id=f"group-{group}",
                max_tokens=12,
                ignore_eos=True,
                logit_bias=denied,
            )
            expected[choice] = Case(case.prompt, case.adapter, 12, answer)
            denied = {**denied, answer[0]: -100.0}
    engine.run()

    check_tokens(family, list(expected.values()), engine.tokens(expected))
    assert len({tuple(case.expected) for case in expected.values()}) == len(expected)
    num_computed = engine.core.stats().num_prompt_tokens - engine.core.stats().num_cached_tokens
    assert num_computed < sum(len(case.prompt) for case in expected.values()) / 2
    assert engine.core.stats().num_free_kv_blocks == engine.core.info.num_kv_blocks
    engine.close()
