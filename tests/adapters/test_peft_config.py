from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from peft.utils.other import get_pattern_key

from loraplex.adapters import peft_config, peft_fields
from loraplex.adapters.added_tokens import MAX_ADDED_TOKENS, AddedToken
from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.invocation import MAX_INVOCATION_TOKENS
from loraplex.adapters.peft_config import (
    MAX_TRAINED_TOKENS,
    PeftConfig,
    parse_peft_config,
    pattern_matches,
)


def parse(**fields: Any) -> PeftConfig:
    return parse_peft_config(json.dumps({**written_by_peft(), **fields}).encode())


def written_by_peft(**settings: Any) -> dict[str, Any]:
    fields: dict[str, Any] = LoraConfig(**settings).to_dict()
    return {key: list(value) if isinstance(value, set) else value for key, value in fields.items()}


def refusal(data: bytes) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as caught:
        parse_peft_config(data)
    return caught.value


def test_accepts_what_peft_writes_by_default() -> None:
    config = parse(r=16, lora_alpha=32)
    assert (config.rank, config.alpha, config.uses_rslora) == (16, 32.0, False)


@pytest.mark.parametrize(
    "fields",
    [
        {"task_type": "CAUSAL_LM"},
        {"auto_mapping": {"base_model_class": "X", "parent_library": "transformers.models.x.y"}},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "v_proj"]},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"exclude_modules": ["lm_head"]},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "mica"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": False},
        {"fan_in_fan_out": True},
        {"lora_dropout": 0.1, "inference_mode": True, "revision": "main"},
        {"runtime_config": {}, "custom_thing": None},
        {"field_of_a_later_version": None, "another": False},
        {"rank_pattern": None, "alpha_pattern": None},
    ],
)
def test_accepts_what_does_not_change_the_output(fields: dict[str, Any]) -> None:
    assert parse(**fields).canonical() == parse().canonical()


def test_added_tokens_are_part_of_the_digest_and_come_by_ascending_id() -> None:
    tokens = [
        {"id": 9, "content": "<b>", "special": True, "ends_output": True},
        {"id": 8, "content": "<a>"},
    ]
    config = parse(added_tokens=tokens)
    assert config.added_tokens == (
        AddedToken(8, "<a>"),
        AddedToken(9, "<b>", special=True, ends_output=True),
    )
    assert config.canonical() != parse().canonical()
    assert parse(added_tokens=config.canonical()["added_tokens"]) == config
    assert parse(added_tokens=[]).canonical() == parse().canonical()


def test_never_runs_a_target_pattern() -> None:
    # as a regular expression this takes PEFT minutes on a module name
    assert parse(target_modules="([a-z0-9_.]+)+X").target_modules == ()


REFUSED: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "another type": ({"peft_type": "LOHA"}, "unsupported_feature", "/peft_type"),
    "no type": ({"peft_type": None}, "unsupported_feature", "/peft_type"),
    "type not text": ({"peft_type": ["LORA"]}, "unsupported_feature", "/peft_type"),
    "token classification": ({"task_type": "TOKEN_CLS"}, "unsupported_feature", "/task_type"),
    "labels of no classifier": (
        {"id2label": {"0": "no"}},
        "config_contradiction",
        "/id2label",
    ),
    "labels that are no object": (
        {"task_type": "SEQ_CLS", "id2label": ["no"]},
        "malformed_config",
        "/id2label",
    ),
    "labels not numbered from 0": (
        {"task_type": "SEQ_CLS", "id2label": {"1": "no", "2": "yes"}},
        "malformed_config",
        "/id2label",
    ),
    "a label that cannot be printed": (
        {"task_type": "SEQ_CLS", "id2label": {"0": "no\u0000"}},
        "malformed_config",
        "/id2label",
    ),
    "no label": ({"task_type": "SEQ_CLS", "id2label": {}}, "malformed_config", "/id2label"),
    "too many labels": (
        {"task_type": "SEQ_CLS", "id2label": {str(n): "x" for n in range(1025)}},
        "malformed_config",
        "/id2label",
    ),
    "labels of too many characters": (
        {"task_type": "SEQ_CLS", "id2label": {str(n): "x" * 200 for n in range(400)}},
        "malformed_config",
        "/id2label",
    ),
    "another problem": (
        {"task_type": "SEQ_CLS", "problem_type": "ranking"},
        "malformed_config",
        "/problem_type",
    ),
    "dora and lora bias": (
        {"use_dora": True, "lora_bias": True},
        "unsupported_feature",
        "/lora_bias",
    ),
    "other biases": ({"bias": "some"}, "malformed_config", "/bias"),
    "biases a list": ({"bias": ["all"]}, "malformed_config", "/bias"),
    "modules a text": ({"modules_to_save": "lm_head"}, "malformed_config", "/modules_to_save"),
    "modules of numbers": ({"modules_to_save": [1]}, "malformed_config", "/modules_to_save"),
    "empty module": ({"modules_to_save": [""]}, "malformed_config", "/modules_to_save"),
    "parameters a text": ({"target_parameters": "x"}, "malformed_config", "/target_parameters"),
    "a token twice": (
        {"trainable_token_indices": [1, 1]},
        "malformed_config",
        "/trainable_token_indices",
    ),
    "a negative token": (
        {"trainable_token_indices": [-1]},
        "malformed_config",
        "/trainable_token_indices",
    ),
    "a token as text": (
        {"trainable_token_indices": {"lm_head": ["1"]}},
        "malformed_config",
        "/trainable_token_indices",
    ),
    "tokens of no module": (
        {"trainable_token_indices": {"": [1]}},
        "malformed_config",
        "/trainable_token_indices",
    ),
    "too many tokens": (
        {"trainable_token_indices": list(range(MAX_TRAINED_TOKENS + 1))},
        "config_too_large",
        "/trainable_token_indices",
    ),
    "added tokens as an object": ({"added_tokens": {}}, "malformed_config", "/added_tokens"),
    "an added token without content": (
        {"added_tokens": [{"id": 5}]},
        "malformed_config",
        "/added_tokens",
    ),
    "an added token of an unknown field": (
        {"added_tokens": [{"id": 5, "content": "<a>", "regex": "x"}]},
        "malformed_config",
        "/added_tokens",
    ),
    "an added token with a flag as text": (
        {"added_tokens": [{"id": 5, "content": "<a>", "special": "yes"}]},
        "malformed_config",
        "/added_tokens",
    ),
    "two added tokens of one content": (
        {"added_tokens": [{"id": 5, "content": "<a>"}, {"id": 6, "content": "<a>"}]},
        "malformed_config",
        "/added_tokens",
    ),
    "an added token of control characters": (
        {"added_tokens": [{"id": 5, "content": "a\x1b[0m"}]},
        "malformed_config",
        "/added_tokens",
    ),
    "too many added tokens": (
        {"added_tokens": [{"id": i, "content": f"<{i}>"} for i in range(MAX_ADDED_TOKENS + 1)]},
        "malformed_config",
        "/added_tokens",
    ),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "unsupported_feature", "/init_lora_weights"),
    "olora": ({"init_lora_weights": "olora"}, "unsupported_feature", "/init_lora_weights"),
    "corda": ({"init_lora_weights": "corda"}, "unsupported_feature", "/init_lora_weights"),
    "loftq": ({"init_lora_weights": "loftq"}, "unsupported_feature", "/init_lora_weights"),
    "lora-ga": ({"init_lora_weights": "lora_ga"}, "unsupported_feature", "/init_lora_weights"),
    "replication": ({"layer_replication": [[0, 2]]}, "unsupported_feature", "/layer_replication"),
    "invocation without tokens": (
        {"alora_invocation_tokens": []},
        "invalid_invocation",
        "/alora_invocation_tokens",
    ),
    "invocation as text": (
        {"alora_invocation_tokens": "certainty"},
        "invalid_invocation",
        "/alora_invocation_tokens",
    ),
    "invocation with a negative token": (
        {"alora_invocation_tokens": [3, -1]},
        "invalid_invocation",
        "/alora_invocation_tokens",
    ),
    "invocation with a truth value": (
        {"alora_invocation_tokens": [True]},
        "invalid_invocation",
        "/alora_invocation_tokens",
    ),
    "long invocation": (
        {"alora_invocation_tokens": [1] * (MAX_INVOCATION_TOKENS + 1)},
        "invalid_invocation",
        "/alora_invocation_tokens",
    ),
    "arrow": ({"arrow_config": {"top_k": 2}}, "unsupported_feature", "/arrow_config"),
    "qalora": ({"use_qalora": True}, "unsupported_feature", "/use_qalora"),
    "kasa": ({"kasa_config": {"beta": 1}}, "unsupported_feature", "/kasa_config"),
    "kasa by default": ({"kasa_config": {}}, "unsupported_feature", "/kasa_config"),
    "velora": ({"velora_config": {}}, "unsupported_feature", "/velora_config"),
    "monteclora": ({"monteclora_config": {}}, "unsupported_feature", "/monteclora_config"),
    "block-diagonal": ({"use_bdlora": {"nblocks": 2}}, "unsupported_feature", "/use_bdlora"),
    "code map": ({"auto_map": {"AutoModel": "x.py"}}, "code_reference_refused", "/auto_map"),
    "foreign class": (
        {"auto_mapping": {"base_model_class": "X", "parent_library": "os"}},
        "code_reference_refused",
        "/auto_mapping",
    ),
    "class and more": (
        {"auto_mapping": {"parent_library": "transformers.models.x", "code": "x"}},
        "code_reference_refused",
        "/auto_mapping",
    ),
    "megatron": ({"megatron_config": {"a": 1}}, "code_reference_refused", "/megatron_config"),
    "own megatron": ({"megatron_core": "evil"}, "code_reference_refused", "/megatron_core"),
    "custom": ({"custom_modules": {"a": "b"}}, "code_reference_refused", "/custom_modules"),
    "runtime": (
        {"runtime_config": {"ephemeral_gpu_offload": True}},
        "code_reference_refused",
        "/runtime_config",
    ),
    "unknown": ({"makes_it_better": 1}, "unknown_config_field", "/makes_it_better"),
    "unknown empty object": ({"makes_better": {}}, "unknown_config_field", "/makes_better"),
    "unknown empty list": ({"makes_better": []}, "unknown_config_field", "/makes_better"),
    "unknown empty text": ({"makes_better": ""}, "unknown_config_field", "/makes_better"),
    "custom and empty": ({"custom_x": {}}, "code_reference_refused", "/custom_x"),
    "unknown zero": ({"makes_it_better": 0}, "unknown_config_field", "/makes_it_better"),
    "rank 0": ({"r": 0}, "invalid_rank", "/r"),
    "negative rank": ({"r": -8}, "invalid_rank", "/r"),
    "no rank": ({"r": None}, "invalid_rank", "/r"),
    "fractional rank": ({"r": 8.0}, "invalid_rank", "/r"),
    "boolean rank": ({"r": True}, "invalid_rank", "/r"),
    "huge rank": ({"r": 4097}, "rank_too_large", "/r"),
    "pattern rank": ({"rank_pattern": {"q_proj": 0}}, "invalid_rank", "/rank_pattern/q_proj"),
    "alpha 0": ({"lora_alpha": 0}, "invalid_alpha", "/lora_alpha"),
    "negative alpha": ({"lora_alpha": -1}, "invalid_alpha", "/lora_alpha"),
    "huge alpha": ({"lora_alpha": 1e38}, "invalid_alpha", "/lora_alpha"),
    "alpha as text": ({"lora_alpha": "16"}, "invalid_alpha", "/lora_alpha"),
    "pattern alpha": ({"alpha_pattern": {"q": "x"}}, "invalid_alpha", "/alpha_pattern/q"),
    "regex": ({"rank_pattern": {".*q_proj": 4}}, "pattern_not_literal", "/rank_pattern"),
    "inner regex": ({"rank_pattern": {"a.*\\.q": 4}}, "pattern_not_literal", "/rank_pattern"),
    "two regexes": ({"rank_pattern": {".*\\..*\\.q": 4}}, "pattern_not_literal", "/rank_pattern"),
    "anchored regex": ({"rank_pattern": {".*\\.^q": 4}}, "pattern_not_literal", "/rank_pattern"),
    "only the prefix": ({"rank_pattern": {".*\\.": 4}}, "pattern_not_literal", "/rank_pattern"),
    "alternatives": ({"alpha_pattern": {"q|v": 4}}, "pattern_not_literal", "/alpha_pattern"),
    "end anchor": ({"rank_pattern": {"q_proj$": 4}}, "pattern_not_literal", "/rank_pattern"),
    "empty pattern": ({"rank_pattern": {"": 4}}, "pattern_not_literal", "/rank_pattern"),
    "pattern a list": ({"rank_pattern": ["q_proj"]}, "malformed_config", "/rank_pattern"),
    "rslora a text": ({"use_rslora": "yes"}, "malformed_config", "/use_rslora"),
    "targets a number": ({"target_modules": 4}, "malformed_config", "/target_modules"),
    "targets of numbers": ({"target_modules": [4]}, "malformed_config", "/target_modules"),
    "name a list": (
        {"base_model_name_or_path": []},
        "malformed_config",
        "/base_model_name_or_path",
    ),
}


@pytest.mark.parametrize(("fields", "reason", "pointer"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(fields: dict[str, Any], reason: str, pointer: str | None) -> None:
    error = refusal(json.dumps({**written_by_peft(), **fields}).encode())
    assert (error.reason, error.pointer) == (reason, pointer)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "malformed_config"),
        (b"[]", "malformed_config"),
        (b"{", "malformed_config"),
        (b"\xff\xfe{}", "malformed_config"),
        (b'{"lora_alpha": NaN}', "malformed_config"),
        (b'{"lora_alpha": 1e999}', "malformed_config"),
        (b'{"a":' * 50_000, "malformed_config"),
        (b'{"r": 8, "r": 16}', "duplicate_key"),
        (b'{"rank_pattern": {"q": 8, "q": 16}}', "duplicate_key"),
        (b" " * (peft_config.MAX_CONFIG_BYTES + 1), "config_too_large"),
    ],
)
def test_refuses_text_that_is_not_one_strict_json_object(data: bytes, reason: str) -> None:
    assert refusal(data).reason == reason


def test_refuses_more_patterns_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_config, "MAX_PATTERNS", 2)
    assert len(parse(rank_pattern={"a": 1, "b": 2}).rank_pattern) == 2
    data = json.dumps({**written_by_peft(), "rank_pattern": {"a": 1, "b": 2, "c": 3}}).encode()
    assert refusal(data).reason == "config_too_large"


@pytest.mark.parametrize("name", ["\x1b[2J\nforged line", "\u2028" * 1000, "a" * 100_000])
def test_hostile_names_are_shown_short_and_printable(name: str) -> None:
    error = refusal(json.dumps({**written_by_peft(), name: 1}).encode())
    for text in (str(error), error.pointer or ""):
        assert text.isprintable()
        assert text.isascii()
        assert len(text) < 300


def test_every_field_of_peft_is_read_without_effect_or_refused() -> None:
    known = [
        peft_fields.READ,
        peft_fields.WITHOUT_EFFECT,
        frozenset(peft_fields.UNSUPPORTED),
        peft_fields.CODE_REFERENCES,
    ]
    assert {field.name for field in dataclasses.fields(LoraConfig)} <= frozenset().union(*known)
    assert sum(map(len, known)) == len(frozenset().union(*known)), "a field has one treatment"


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dora": ({"use_dora": True}, {"use_dora": True}),
    "lora bias": ({"lora_bias": True}, {"lora_bias": True}),
    "biases": ({"bias": "lora_only"}, {"bias": "lora_only"}),
    "whole modules": (
        {"modules_to_save": ["lm_head", "embed_tokens", "lm_head"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "parameters": (
        {"target_parameters": ["up", "down"]},
        {"target_parameters": ["down", "up"]},
    ),
    "tokens": (
        {"trainable_token_indices": [5, 2]},
        {"trainable_token_indices": [5, 2]},
    ),
    "tokens by module": (
        {"trainable_token_indices": {"lm_head": [5], "embed_tokens": [2]}},
        {"trainable_token_indices": {"lm_head": [5], "embed_tokens": [2]}},
    ),
    "tying": ({"ensure_weight_tying": True}, {"ensure_weight_tying": True}),
}


@pytest.mark.parametrize(("fields", "canonical"), CHANGES.values(), ids=CHANGES.keys())
def test_what_decides_the_output_stands_in_the_canonical_form(
    fields: dict[str, Any], canonical: dict[str, Any]
) -> None:
    config = parse(**fields)
    assert config.canonical() == {**parse().canonical(), **canonical}
    again = parse_peft_config(json.dumps(config.to_peft()).encode())
    assert again.canonical() == config.canonical()


def test_the_canonical_form_of_plain_adapters_is_what_it_always_was() -> None:
    assert parse(rank_pattern={"q": 4}).canonical() == {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8.0,
        "use_rslora": False,
        "rank_pattern": [["q", 4]],
        "alpha_pattern": [],
    }


def test_unsupported_features_name_the_way_out() -> None:
    error = refusal(json.dumps({**written_by_peft(), "init_lora_weights": "pissa"}).encode())
    assert "path_initial_model_for_weight_conversion" in str(error)


def test_scale_is_alpha_over_rank_or_its_root() -> None:
    patterns: dict[str, Any] = {"rank_pattern": {"q_proj": 16}, "alpha_pattern": {"q_proj": 64}}
    plain, rslora = parse(**patterns), parse(use_rslora=True, **patterns)
    assert (plain.scale_of("x.v_proj"), plain.scale_of("x.q_proj")) == (8 / 8, 64 / 16)
    assert rslora.scale_of("x.v_proj") == 8 / math.sqrt(8)
    assert rslora.scale_of("x.q_proj") == 64 / math.sqrt(16)


def test_order_of_patterns_is_part_of_the_canonical_form() -> None:
    one = parse(rank_pattern={"q_proj": 4, "0.q_proj": 8})
    other = parse(rank_pattern={"0.q_proj": 8, "q_proj": 4})
    assert one.rank_of("layers.0.q_proj") != other.rank_of("layers.0.q_proj")
    assert one.canonical() != other.canonical()


def test_numbers_of_either_kind_are_one_canonical_value() -> None:
    assert json.dumps(parse(lora_alpha=16).canonical()) == json.dumps(
        parse(lora_alpha=16.0).canonical()
    )


NAMES = st.text("ab.1_-", min_size=1, max_size=8)


@given(
    patterns=st.lists(NAMES, max_size=4, unique=True),
    module=NAMES,
    prefix=st.sampled_from(["", "^", r".*\."]),
)
def test_literal_patterns_match_as_peft_matches_them(
    patterns: list[str], module: str, prefix: str
) -> None:
    keys = [f"{prefix}{key}" for key in patterns]
    first = next((key for key in keys if pattern_matches(key, module)), module)
    assert first == get_pattern_key(keys, module)


@pytest.mark.parametrize(
    ("pattern", "module", "matches"),
    [
        ("q_proj", "model.layers.0.self_attn.q_proj", True),
        ("q_proj", "model.layers.0.self_attn.xq_proj", False),
        ("0.self_attn.q_proj", "model.layers.10.self_attn.q_proj", False),
        ("^model.layers.0.q_proj", "model.layers.0.q_proj", True),
        ("^layers.0.q_proj", "model.layers.0.q_proj", False),
        ("model.layers.0.q_proj.weight", "q_proj", False),
        (r".*\.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj", True),
        (r".*\.gate_up_proj", "gate_up_proj", False),
        (r".*\.up_proj", "model.layers.0.mlp.experts.gate_up_proj", False),
    ],
)
def test_pattern_examples(pattern: str, module: str, matches: bool) -> None:
    assert pattern_matches(pattern, module) is matches
