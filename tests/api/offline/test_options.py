"""The arguments of `LLM` configure the engine as the options of `loraplex serve` do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from loraplex import LLM, LLMError
from loraplex.api.offline.options import arguments, engine_config
from loraplex.engine.config import Acceptance, EngineConfig, GenerationConfig, KvDtype, Quantization
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.option import options_of

GIB = 1 << 30
GIVEN: Mapping[str, tuple[Any, str, Any]] = {
    "quantize": ("int4", "quantization", Quantization.INT4),
    "quantization": ("fp8", "quantization", Quantization.FP8),
    "quantize_embeddings": ("int8", "embedding_quantization", Quantization.INT8),
    "dtype": ("bfloat16", "dtype", "bfloat16"),
    "max_model_len": (512, "max_model_len", 512),
    "max_num_seqs": (65, "max_num_seqs", 65),
    "enforce_eager": (True, "enforce_eager", True),
    "memory_gib": (1.5, "memory_bytes", 3 * GIB // 2),
    "arena_gib": (0.25, "arena_bytes", GIB // 4),
    "kv_cache_gib": (2, "kv_cache_bytes", 2 * GIB),
    "swap_space": (4, "swap_bytes", 4 * GIB),
    "kv_cache_dtype": ("int8", "kv_dtype", KvDtype.INT8),
    "speculation": ("ngram,early_exit:4", "speculation", ("ngram", "early_exit:4")),
    "max_draft_tokens": (3, "max_draft_tokens", 3),
    "generation_config": ("none", "generation_config", GenerationConfig.NONE),
    "acceptance": ("rejection", "acceptance", Acceptance.REJECTION),
    "enable_prefix_caching": (False, "prefix_caching", False),
    "num_threads": (1, "num_threads", 1),
}


@pytest.mark.parametrize("name", GIVEN)
def test_an_argument_sets_its_field_and_no_other(name: str) -> None:
    value, field, expected = GIVEN[name]
    plain, config = (asdict(engine_config("m", given)) for given in ({}, {name: value}))
    assert config == {**plain, field: expected}


def test_every_option_of_the_engine_is_an_argument() -> None:
    assert set(arguments().values()) >= set(options_of(EngineConfig))
    assert set(arguments().values()) <= {field.name for field in fields(EngineConfig)}


def test_without_arguments_the_engine_is_that_of_the_server() -> None:
    assert engine_config(Path("m"), {}) == EngineConfig("m", speculation=("ngram",))
    assert engine_config("m", {"quantization": None, "max_model_len": None}) == EngineConfig(
        "m", speculation=("ngram",)
    )
    assert engine_config("m", {"speculation": ["off"]}).speculation == ()


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"quantization": "int7"}, "quantization", "'int7' is not one of none, int8"),
        ({"quantization": "awq"}, "quantization", "served as it is"),
        ({"max_num_seqs": "many"}, "max_num_seqs", "Expected `int`"),
        ({"memory_gib": 0.01}, "memory_gib", "must be at least 0.1"),
        ({"memory_gib": "1"}, "memory_gib", "wrong type"),
        ({"speculation": "lookahead"}, "speculation", "lookahead is not one of"),
        ({"quantize_group_size": 32}, "quantize_group_size", "requires"),
        ({"max_num_seqs": 0}, "max_num_seqs", "must be at least 1"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_the_arguments_name(
    given: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidParameter, match=f"^{param}: .*{words}") as caught:
        engine_config("m", given)
    assert caught.value.param == param


def test_arguments_that_do_not_exist_are_explained_all_at_once() -> None:
    with pytest.raises(LLMError) as caught:
        LLM("m", enable_lora=True, max_loras=4, gpu_memory_utilization=0.5, quantise="int8", x_y=1)
    assert caught.value.code == "unsupported_parameter"
    lines = str(caught.value).splitlines()
    assert [line.strip().partition(":")[0] for line in lines] == [
        *("enable_lora", "max_loras", "gpu_memory_utilization", "quantise", "x_y")
    ]
    assert "generate(..., adapter=FOLDER)" in lines[0]
    assert "arena_gib sets their device memory" in lines[1]
    assert "memory_gib" in lines[2]
    assert lines[3].endswith("Did you mean quantize?")
    assert "--" not in str(caught.value)


def test_a_base_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LLMError) as caught:
        LLM(tmp_path / "nowhere")
    assert caught.value.code == "base_not_found"
    assert str(tmp_path / "nowhere") in str(caught.value)
