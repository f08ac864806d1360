"""Auxiliary tensors equal PEFT, in one mixed batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.adapters.identity import AdapterKey
from loraplex.kernels.lora_batch import LoraBatch, LoraBatchBuilder
from loraplex.kernels.quantize import WeightFormat
from support.engine import LocalEngine
from support.feature_blocks import write_peft_block
from support.features import TOKENS, Feature, World, dense_logits, make_world
from support.marks import marked_slow
from support.paged import paged_logits

TOLERANCE = 1e-4
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

LLAMA: dict[str, Feature] = {
    "plain": {"target_modules": LINEAR},
    "head": {"target_modules": ["lm_head"]},
    "head and layers": {"target_modules": ["lm_head", "q_proj"], "use_rslora": True},
    "embedding": {"target_modules": ["embed_tokens"]},
    "both ends": {"target_modules": ["embed_tokens", "lm_head", "up_proj"], "r": 9},
    "dora": {"target_modules": LINEAR, "use_dora": True},
    "dora, some siblings": {"target_modules": ["k_proj", "up_proj"], "use_dora": True, "r": 33},
    "dora, both ends": {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    "lora bias": {"target_modules": [*LINEAR, "lm_head"], "lora_bias": True},
    "whole head": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "whole embedding": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
    "whole ends": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens": {"target_modules": ["v_proj"], "trainable_token_indices": TOKENS},
}
TIED: dict[str, Feature] = {
    "plain": {"target_modules": LINEAR},
    "head of a tied pair": {"target_modules": ["lm_head"]},
    "embedding of a tied pair": {"target_modules": ["embed_tokens"]},
    "embedding, kept tied": {
        "target_modules": ["embed_tokens", "q_proj"],
        "ensure_weight_tying": True,
    },
    "dora on the embedding": {"target_modules": ["embed_tokens"], "use_dora": True},
    "whole embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "whole embedding, kept tied": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "tokens, tied by PEFT": {"target_modules": ["q_proj"], "trainable_token_indices": TOKENS},
    "tokens of the head": {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": TOKENS[:2], "lm_head": TOKENS[1:]},
    },
}
BIASES: dict[str, Feature] = {
    "plain": {"target_modules": LINEAR},
    "bias of the layers": {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"},
    "dora beside a bias": {"target_modules": LINEAR, "use_dora": True},
    "dora and bias": {"target_modules": LINEAR, "use_dora": True, "bias": "lora_only"},
    "lora bias": {"target_modules": ["q_proj", "k_proj"], "lora_bias": True},
    "both biases": {"target_modules": ["k_proj"], "lora_bias": True, "bias": "lora_only"},
    "all biases": {"target_modules": ["k_proj"], "bias": "all"},
}
_CONV1D: Feature = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
CONV1D: dict[str, Feature] = {
    "dora": {**_CONV1D, "use_dora": True},
    "lora bias": {**_CONV1D, "lora_bias": True},
    "bias": {**_CONV1D, "bias": "lora_only"},
}
HEAD_WITH_BIAS: dict[str, Feature] = {
    "lora": {"target_modules": ["lm_head"]},
    "dora": {"target_modules": ["lm_head", "dense"], "use_dora": True},
    "bias": {"target_modules": ["lm_head"], "bias": "lora_only"},
    "whole": {"target_modules": ["fc1"], "modules_to_save": ["lm_head"]},
}
ENDS: dict[str, Feature] = {
    "lora": {"target_modules": ["embed_tokens", "lm_head"]},
    "whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}
FUSED: dict[str, Feature] = {
    "dora": {"target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True},
    "lora bias": {"target_modules": ["qkv_proj", "gate_up_proj"], "lora_bias": True},
}
FAMILIES: dict[str, dict[str, Feature]] = {
    "llama": LLAMA,
    "gemma2-softcap-window": TIED,
    "gemma3-window": TIED,
    "cohere": TIED,
    "qwen2": BIASES,
    "gpt2-conv1d": CONV1D,
    "phi": HEAD_WITH_BIAS,
    "phi3-fused": FUSED,
    "granite": ENDS,
    "exaone4-window": ENDS,
}
SLOW_FAMILIES = {"gemma3-window", "cohere", "exaone4-window"}
"""Families whose features another one has too."""


@pytest.mark.parametrize("family", marked_slow(FAMILIES, slow=SLOW_FAMILIES))
def test_every_feature_equals_peft_in_one_mixed_batch(family: str, tmp_path: Path) -> None:
    features = FAMILIES[family]
    world = make_world(tmp_path, family, list(features.values()))
    sequences = world.sequences()

    logits = world.serve(sequences)

    for name, model, tokens, ours in zip(
        features, world.tuned, sequences[1:-1], logits[1:-1], strict=True
    ):
        expected, plain = dense_logits(model, tokens), dense_logits(world.plain, tokens)
        assert (expected - plain).abs().max() > 100 * TOLERANCE, f"{name} must have an effect"
        assert (ours - expected).abs().max() < TOLERANCE, name
    unadapted = world.serve(sequences, with_adapters=False)
    for index in (0, -1):
        assert torch.equal(logits[index], unadapted[index]), "base rows are the base's, bit by bit"


@pytest.mark.parametrize("family", ["qwen2", "phi"])
def test_vectors_applied_by_one_launch_give_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, also for adapters that replace a matrix and hold a vector for the same layer."""
    world = make_world(tmp_path, family, list(FAMILIES[family].values()))
    sequences = world.sequences()
    expected = world.serve(sequences)
    build = LoraBatchBuilder.build
    launches = []

    def launching(builder: LoraBatchBuilder, *args: Any, **kwargs: Any) -> LoraBatch | None:
        batch = build(builder, *args, **kwargs)
        if batch is None or not batch.auxiliary:
            return batch
        launches.append(batch)
        rows = world.arena.replacing_rows
        segments = tuple(segment for segment in batch.auxiliary if segment.row in rows)
        return replace(batch, launches_vectors=True, auxiliary=segments)

    monkeypatch.setattr(LoraBatchBuilder, "build", launching)
    for ours, theirs in zip(world.serve(sequences), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert launches


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_features_on_a_quantized_base_equal_peft_on_the_dequantized_one(
    weight_format: WeightFormat, tmp_path: Path
) -> None:
    features = {name: BIASES[name] for name in ("plain", "dora and bias", "both biases")}
    world = make_world(tmp_path, "qwen2", list(features.values()), weight_format=weight_format)
    sequences = world.sequences()
    logits = world.serve(sequences)
    for name, model, tokens, ours in zip(
        features, world.tuned, sequences[1:-1], logits[1:-1], strict=True
    ):
        expected = dense_logits(model, tokens)
        # An activation between two codes, or two numbers of bf16, may be rounded to the other one.
        assert (ours - expected).norm() < 0.01 * expected.norm(), name
        assert (expected - dense_logits(world.plain, tokens)).norm() > 0.1 * expected.norm()


def test_features_in_bfloat16_stay_close_to_peft_in_float32(tmp_path: Path) -> None:
    features = [LLAMA[name] for name in ("dora", "lora bias", "both ends", "whole ends", "tokens")]
    world = make_world(tmp_path, "llama", features, dtype="bfloat16")
    sequences = world.sequences()
    logits = world.serve(sequences)
    for model, tokens, ours in zip(world.tuned, sequences[1:-1], logits[1:-1], strict=True):
        expected = dense_logits(model, tokens)
        effect = (expected - dense_logits(world.plain, tokens)).norm()
        assert (ours - expected).norm() < 0.2 * effect


ISOLATED = ("dora", "lora bias", "both ends", "whole ends", "tokens", "plain")


@pytest.mark.parametrize("value", marked_slow([torch.nan, torch.inf, 3e38], slow={torch.inf}))
def test_what_one_adapter_overflows_to_stays_in_its_own_rows(value: float, tmp_path: Path) -> None:
    world = make_world(tmp_path, "llama", [LLAMA[name] for name in ISOLATED])
    sequences = world.sequences()
    clean = world.serve(sequences)
    for broken, (row, _) in enumerate(world.rows):
        held = world.arena.flat.clone()
        poison(world, row, value)

        logits = world.serve(sequences)

        for index, (ours, before) in enumerate(zip(logits, clean, strict=True)):
            if index == broken + 1:
                assert not (ours - before).abs().max() < 0.1, "the poison must be read"
            else:
                # The order of summation depends on who joined the decode window first.
                assert (ours - before).abs().max() < TOLERANCE / 10, (ISOLATED[broken], index)
        for index in (0, -1):
            assert torch.equal(logits[index], clean[index])
        world.arena.flat.copy_(held)
        forget_copies(world, row)


def poison(world: World, row: int, value: float) -> None:
    """Overwrite all extras of a row's adapter, and its A matrices if it has none.

    A, because what intake has let through is finite, and of that B keeps adapters apart.
    """
    auxiliary = [placed for held in world.arena.row_auxiliary[row].values() for placed in held]
    for placed in auxiliary:
        world.arena.flat[placed.offset : placed.offset + placed.extra.num_elements] = value
    for a_offset, _, rank in () if auxiliary else world.arena.row_tables[row]:
        world.arena.flat[a_offset : a_offset + rank * 8] = value
    forget_copies(world, row)


def forget_copies(world: World, row: int) -> None:
    (forget,) = world.arena.on_remove
    forget(row)


def test_a_row_that_passed_to_another_adapter_serves_nothing_of_the_first(tmp_path: Path) -> None:
    later = {"target_modules": ["v_proj"], "trainable_token_indices": TOKENS[1:3]}
    world = make_world(tmp_path, "llama", [LLAMA["tokens"], later, LLAMA["head"]])
    sequences = world.sequences()[:3]
    world.serve(world.sequences())
    for row, _ in world.rows:
        world.remove(row)
    for index in (1, 2):
        placed = world.publish(index)
        assert placed[0] == world.rows[index - 1][0]
        ours = paged_logits(
            world.base,
            sequences,
            builder=LoraBatchBuilder(world.arena, world.base.device),
            adapters=[(-1, 0), placed, (-1, 0)],
        )
        assert (ours[1] - dense_logits(world.tuned[index], sequences[1])).abs().max() < TOLERANCE


def test_only_the_kept_rows_of_a_step_meet_the_output_head(tmp_path: Path) -> None:
    """The engine keeps one row of each sequence: its adapter's, whatever ran before it."""
    names = ("head", "whole ends", "tokens", "dora", "plain")
    world = make_world(tmp_path / "world", "llama", [LLAMA[name] for name in names])
    engine = LocalEngine(
        tmp_path / "world" / "base", tmp_path, max_num_seqs=8, max_num_batched_tokens=16
    )
    keys = [add_block(engine, world, index) for index in range(len(names))]
    prompts = [sequence[: 9 + index] for index, sequence in enumerate(world.sequences()[1:-1])]
    requests = [
        engine.submit(prompt, key, max_tokens=6, ignore_eos=True, return_logits=True)
        for prompt, key in zip([*prompts, prompts[0]], [*keys, None], strict=True)
    ]

    engine.run()

    for request, prompt, model in zip(
        requests, [*prompts, prompts[0]], [*world.tuned, world.plain], strict=True
    ):
        answer = engine.answers[request]
        assert len(answer.token_ids) == 6
        expected = dense_logits(model, [*prompt, *answer.token_ids[:-1]])[len(prompt) - 1 :]
        assert expected.argmax(dim=-1).tolist() == answer.token_ids
    engine.close()


def add_block(engine: LocalEngine, world: World, index: int) -> AdapterKey:
    path = engine.blocks / f"feature {index}.block"
    key = AdapterKey("acme", f"sha256:feature {index}")
    write_peft_block(world.tuned[index], world.plain, path, key=key, layout=engine.core.info.layout)
    engine.paths[key] = path
    return key
