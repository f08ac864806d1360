"""Self-speculation: the base without some of its layers drafts, using its own keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from loraplex.engine.config import Acceptance, EngineConfig, KvDtype
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.layer_numbers import layers_text, parse_layers
from loraplex.engine.messages import SpeculationParams
from loraplex.engine.model.layer_list import layer_list
from loraplex.engine.model.layer_subset import LayerSubset, drafting_layers
from loraplex.engine.model.whole_base import load_base_model
from support.engine import LocalEngine
from support.families import FOUR_LAYERS, SERVED, VOCAB_SIZE, save_family
from support.marks import marked_slow
from support.models import make_adapter
from support.paged import paged_logits

PROMPTS = [[7, 1, 12, 90], [3, 3, 5] * 6, [100, 41], list(range(40, 71)), [9] * 12, [66, 5, 4]]
FAMILIES = (
    "deepseek_v3-mla",
    "mixtral",
    "gemma2-softcap-window",
    "gpt2-conv1d",
    "gpt_neox",
    "gpt_oss-sinks-window",
    "opt",
    "phi3-fused",
)


def answer_all(
    engine: LocalEngine, adapter_folders: Sequence[Path], temperature: float, proposer: str = "skip"
) -> tuple[list[list[int]], int, int]:
    """The answers of base and adapters in one mixed batch, and the drafted and accepted tokens."""
    keys = [None, *(engine.add_adapter(folder) for folder in adapter_folders)]
    asked = SpeculationParams(proposer, 4) if engine.core.parts.config.speculation else None
    ids = [
        engine.submit(
            prompt,
            keys[index % len(keys)],
            max_tokens=16,
            temperature=temperature,
            seed=index,
            ignore_eos=True,
            repetition_penalty=1.1 if index == 1 else 1.0,
            speculation=asked,
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    engine.run()
    engine.close()
    ends = [engine.answers[name].end for name in ids]
    return (
        engine.tokens(ids),
        sum(end.num_draft_tokens for end in ends),
        sum(end.num_accepted_tokens for end in ends),
    )


@pytest.mark.parametrize(
    ("layers", "temperature"),
    [
        ("1", 0.7),
        *(pytest.param("0", temperature, marks=pytest.mark.slow) for temperature in (0.0, 0.7)),
    ],
)
def test_the_answers_are_those_of_plain_decoding(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path, layers: str, temperature: float
) -> None:
    plain, _, _ = answer_all(LocalEngine(tiny_base, tmp_path), adapter_folders, temperature)
    engine = LocalEngine(tiny_base, tmp_path, speculation=(f"skip:{layers}",))
    tokens, num_drafted, _ = answer_all(engine, adapter_folders, temperature)
    assert tokens == plain
    assert num_drafted > 60


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"kv_dtype": KvDtype.INT8},
        {"kv_dtype": KvDtype.INT4, "kv_cache_bytes": 64 << 20},
        {"attention_window": 8, "attention_sinks": 2, "kv_block_size": 4},
        {"kv_cache_bytes": 40 << 10, "max_model_len": 64},
    ],
    ids=["int8-kv", "int4-kv", "window", "preempted"],
)
def test_it_shares_the_cache_that_the_target_has(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path, config: dict[str, Any]
) -> None:
    plain, _, _ = answer_all(LocalEngine(tiny_base, tmp_path, **config), adapter_folders, 0.7)
    engine = LocalEngine(tiny_base, tmp_path, speculation=("skip:0",), **config)
    tokens, num_drafted, _ = answer_all(engine, adapter_folders, 0.7)
    assert tokens == plain
    assert num_drafted > 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "target"),
    [
        ("gemma2-softcap-window", "down_proj"),
        ("deepseek_v3-mla", "o_proj"),
        ("gpt_neox", "dense_h_to_4h"),
    ],
)
def test_the_answers_of_other_families_are_those_of_plain_decoding(
    case: str, target: str, tmp_path: Path
) -> None:
    model_type, differences = SERVED[case]
    base = save_family(tmp_path / "base", model_type, {**differences, **FOUR_LAYERS})
    adapters = [make_adapter(base, tmp_path / "adapter", seed=1, target_modules=[target])]
    plain, _, _ = answer_all(LocalEngine(base, tmp_path), adapters, 0.0)
    engine = LocalEngine(base, tmp_path, speculation=("skip:1,2",))
    tokens, num_drafted, _ = answer_all(engine, adapters, 0.0)
    assert tokens == plain
    assert num_drafted > 60


@pytest.mark.parametrize("case", marked_slow(FAMILIES, slow=FAMILIES[1:]))
def test_drafts_have_the_logits_of_a_model_that_lacks_the_layers(case: str, tmp_path: Path) -> None:
    model_type, differences = SERVED[case]
    path = save_family(tmp_path, model_type, {**differences, **FOUR_LAYERS})
    base = load_base_model(EngineConfig(str(path), device="cpu"))
    subset = LayerSubset("skip", base.model, base.config, [1, 2])
    sequence = torch.randint(VOCAB_SIZE, (21,), generator=torch.Generator().manual_seed(1))

    with subset.only():
        drafts = paged_logits(base, [sequence.tolist()])[0]
    own = paged_logits(base, [sequence.tolist()])[0]

    for ours, kept in ((drafts, [1, 2]), (own, [0, 1, 2, 3])):
        with torch.inference_mode():
            theirs = load_cut(path, kept)(sequence[None], use_cache=False).logits[0]
        assert (ours - theirs).abs().max() < 1e-4
    assert (drafts - own).abs().max() > 0.01


def load_cut(path: Path, kept: Sequence[int]) -> Any:
    """The checkpoint in transformers, with these layers alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    found = layer_list(model, model.config)
    assert found is not None
    place, layers = found
    parent, _, name = place.rpartition(".")
    setattr(model.get_submodule(parent), name, nn.ModuleList(layers[index] for index in kept))
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[index] for index in kept]
    model.config.num_hidden_layers = len(kept)
    return model


@pytest.mark.slow
def test_the_first_layers_are_what_early_exit_computes(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path
) -> None:
    counts = []
    for entry in ("early_exit:1", "skip:1"):
        engine = LocalEngine(tiny_base, tmp_path, speculation=(entry,))
        counts.append(answer_all(engine, adapter_folders, 0.7, entry.partition(":")[0]))
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_both_can_be_configured_and_a_request_chooses(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path
) -> None:
    plain, _, _ = answer_all(LocalEngine(tiny_base, tmp_path), adapter_folders, 0.0)
    for proposer in ("early_exit", "skip"):
        engine = LocalEngine(tiny_base, tmp_path, speculation=("early_exit:1", "skip:0"))
        tokens, num_drafted, _ = answer_all(engine, adapter_folders, 0.0, proposer)
        assert tokens == plain
        assert num_drafted > 60


@pytest.mark.parametrize("acceptance", Acceptance)
def test_of_what_a_base_drafts_without_idle_layers_everything_is_accepted(
    tmp_path: Path, acceptance: Acceptance
) -> None:
    """A layer that adds nothing to its input is left out without a trace."""
    base = save_family(tmp_path / "base", "llama", FOUR_LAYERS)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    for index in (0, 2):
        nn.init.zeros_(model.model.layers[index].self_attn.o_proj.weight)
        nn.init.zeros_(model.model.layers[index].mlp.down_proj.weight)
    model.save_pretrained(base)
    engine = LocalEngine(base, tmp_path, speculation=("skip:0,2",), acceptance=acceptance)
    _, num_drafted, num_accepted = answer_all(engine, [], 0.7)
    assert num_accepted == num_drafted > 60


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("2", "the base has no layer 2, its layers are 0 to 1"),
        ("0-1", "has to keep at least one layer"),
        ("", "neither a layer nor a range"),
        ("one", "neither a layer nor a range"),
        ("0,0", "names a layer twice"),
    ],
)
def test_layers_that_cannot_be_left_out_are_refused(
    tiny_base: Path, tmp_path: Path, argument: str, complaint: str
) -> None:
    with pytest.raises(InvalidParameter, match=complaint):
        LocalEngine(tiny_base, tmp_path, speculation=(f"skip:{argument}",))


def test_pipeline_ranks_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="skip"):
        EngineConfig("base", speculation=("skip:1",), pipeline_parallel_size=2)


def test_a_failing_draft_leaves_the_whole_model(tiny_base: Path) -> None:
    base = load_base_model(EngineConfig(str(tiny_base), device="cpu"))
    subset = LayerSubset("skip", base.model, base.config, [1])
    before = paged_logits(base, [[5, 6, 7, 8]])[0]
    with pytest.raises(RuntimeError, match="midway"), subset.only():
        raise RuntimeError("midway")
    assert torch.equal(paged_logits(base, [[5, 6, 7, 8]])[0], before)


@pytest.mark.parametrize(
    ("text", "layers"),
    [("3", (3,)), ("8-10,3", (3, 8, 9, 10)), ("0,1", (0, 1)), ("0-1,3,5-7", (0, 1, 3, 5, 6, 7))],
)
def test_sets_of_layers_are_read_and_written(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text) == layers
    assert parse_layers(layers_text(layers)) == layers


def test_neighbours_are_written_as_a_range() -> None:
    assert layers_text([10, 3, 9, 8, 5]) == "3,5,8-10"


def test_proposers_say_which_layers_they_compute() -> None:
    config = EngineConfig("base", speculation=("ngram", "skip:1,3", "early_exit:2"))
    kept = {name: list(layers) for name, layers in drafting_layers(config, 6).items()}
    assert kept == {"skip": [0, 2, 4, 5], "early_exit": [0, 1]}
