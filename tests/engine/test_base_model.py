"""Loading, identity and quantization of the base."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loraplex.engine.checkpoint.base_identity import compute_base_id, compute_runtime_id
from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.errors import InvalidParameter, UnsupportedModel
from loraplex.engine.model.whole_base import load_base_model
from loraplex.kernels.quantize import WeightFormat
from support.models import make_tiny_llama
from support.paged import paged_logits
from support.quantized import load_rounded

SEQUENCES = [[1, 2, 3, 4, 5, 6, 7, 8], list(range(40, 70))]


def edit_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_the_same_files_have_the_same_id_wherever_they_lie(tiny_base: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_base, copy)
    edit_config(copy, transformers_version="0.0.0", _name_or_path="elsewhere")
    assert compute_base_id(copy) == compute_base_id(tiny_base)


def test_ids_are_those_of_the_tagged_parts_with_their_lengths(tmp_path: Path) -> None:
    def encode(*fields: bytes) -> bytes:
        return b"".join(bytes([len(field)]) + bytes(7) + field for field in fields)

    config = {"z": 1, "dtype": "float16", "torch_dtype": "float16", "a": [2]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = [b"1.safetensors", b"2.safetensors", b"merges.txt", b"vocab.json"]
    for name in [*names, b"README.md"]:
        (tmp_path / name.decode()).write_bytes(b"of " + name)
    parts = [encode(b"config.json", b'{"a": [2], "z": 1}')]
    parts += [encode(name, hashlib.sha256(b"of " + name).digest()) for name in names]
    encoded = b"loraplex base v1" + b"".join(parts)
    base_id = compute_base_id(tmp_path)
    assert base_id == "sha256:" + hashlib.sha256(encoded).hexdigest()
    served = encode(b"base", base_id.encode(), b"quantization", b"int8")
    served += encode(b"quantization_group_size", b"32")
    served += encode(b"quantization_exclude", b'["*.o_proj", "b"]')
    served += encode(b"embedding_quantization", b"int4", b"dtype", b"bfloat16")
    served += encode(b"kv_dtype", b"auto", b"attention_window", b"64", b"attention_sinks", b"4")
    assert (
        compute_runtime_id(
            base_id,
            quantization="int8",
            quantization_group_size=32,
            quantization_exclude=("*.o_proj", "b"),
            embedding_quantization="int4",
            dtype="bfloat16",
            kv_dtype="auto",
            attention_window=64,
            attention_sinks=4,
        )
        == "sha256:" + hashlib.sha256(b"loraplex runtime v4" + served).hexdigest()
    )


def test_other_weights_config_or_tokenizer_are_another_base(
    tiny_base: Path, tmp_path: Path
) -> None:
    ids = {compute_base_id(tiny_base)}
    for name in ("weights", "config", "tokenizer"):
        copy = tmp_path / name
        shutil.copytree(tiny_base, copy)
        if name == "weights":
            data = bytearray((copy / "model.safetensors").read_bytes())
            data[-1] ^= 1
            (copy / "model.safetensors").write_bytes(data)
        elif name == "config":
            edit_config(copy, rms_norm_eps=1e-3)
        else:
            (copy / "tokenizer.json").write_text("{}")
        ids.add(compute_base_id(copy))
    assert len(ids) == 4


def test_how_a_base_is_served_is_part_of_its_runtime_id_only(tiny_base: Path) -> None:
    base_id = compute_base_id(tiny_base)
    served = {
        "quantization": "none",
        "quantization_group_size": None,
        "quantization_exclude": (),
        "embedding_quantization": "none",
        "dtype": "float32",
        "kv_dtype": "auto",
        "attention_window": None,
        "attention_sinks": 0,
    }
    changes: list[dict[str, object]] = [
        {},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"quantization": "int4", "quantization_group_size": 0},
        {"quantization": "int4", "quantization_exclude": ("a",)},
        {"quantization": "int4", "quantization_exclude": ("a", "b")},
        {"embedding_quantization": "int4"},
        {"dtype": "bfloat16"},
        {"kv_dtype": "int8"},
        {"attention_window": 64},
        {"attention_window": 64, "attention_sinks": 4},
    ]
    ids = {compute_runtime_id(base_id, **{**served, **change}) for change in changes}  # type: ignore[arg-type]
    assert len(ids | {base_id}) == len(changes) + 1


def test_siblings_become_one_projection_and_the_rest_stays_alone(tiny_base: Path) -> None:
    layout = load_base_model(EngineConfig(str(tiny_base), device="cpu")).layout
    names = [[part.name.rpartition(".")[2] for part in p.slices] for p in layout.projections]
    layer = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert names == [["embed_tokens"], *layer * 2, ["lm_head"]]
    assert layout.refused == {}


def test_an_int8_base_stays_close_to_the_original(tiny_base: Path) -> None:
    exact = load_base_model(EngineConfig(str(tiny_base), device="cpu"))
    int8 = load_base_model(
        EngineConfig(str(tiny_base), device="cpu", quantization=Quantization.INT8)
    )
    assert int8.layout == exact.layout
    assert int8.weight_bytes < 0.6 * exact.weight_bytes
    for ours, theirs in zip(
        paged_logits(int8, SEQUENCES), paged_logits(exact, SEQUENCES), strict=True
    ):
        error = (ours - theirs).norm() / theirs.norm()
        assert 0 < error < 0.1


def test_an_int4_base_is_the_original_with_rounded_weights(tiny_base: Path) -> None:
    config = EngineConfig(str(tiny_base), device="cpu", quantization=Quantization.INT4)
    exact = load_base_model(replace(config, quantization=Quantization.NONE))
    int4 = load_base_model(config)
    assert int4.layout == exact.layout
    assert int4.weight_bytes < 0.6 * exact.weight_bytes
    rounded = load_rounded(tiny_base, WeightFormat.INT4)
    for tokens, ours in zip(SEQUENCES, paged_logits(int4, SEQUENCES), strict=True):
        expected = rounded(torch.tensor([tokens]), use_cache=False).logits[0]
        assert (ours - expected).norm() < 0.02 * expected.norm(), "activations are bf16"
        plain = paged_logits(exact, [tokens])[0]
        assert (ours - plain).norm() > 0.05 * plain.norm()


@pytest.mark.parametrize("form", [Quantization.INT8, Quantization.INT4])
def test_the_quantized_answer_of_one_sequence_does_not_depend_on_its_neighbours(
    form: Quantization, tiny_base: Path
) -> None:
    base = load_base_model(EngineConfig(str(tiny_base), device="cpu", quantization=form))
    alone = paged_logits(base, SEQUENCES[:1])[0]
    together = paged_logits(base, SEQUENCES)[0]
    assert (alone - together).abs().max() < 0.02 * alone.abs().max()


def test_bfloat16_is_served_where_the_checkpoint_is_bfloat16(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path, dtype=torch.bfloat16)
    model = load_base_model(EngineConfig(str(path), device="cpu", dtype="bfloat16"))
    assert model.dtype is torch.bfloat16
    exact = load_base_model(EngineConfig(str(path), device="cpu", dtype="float32"))
    ours, theirs = paged_logits(model, SEQUENCES)[1], paged_logits(exact, SEQUENCES)[1]
    assert (ours - theirs).norm() / theirs.norm() < 0.1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "that no tensor has"),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"layer_types": ["full_attention", "indexed_attention"]}, "indexed_attention layers"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_refused_with_the_reason(
    tiny_base: Path, tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_base, copy)
    edit_config(copy, **changes)
    with pytest.raises(UnsupportedModel, match=reason):
        load_base_model(EngineConfig(str(copy), device="cpu"))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model": "/no/such/folder"}, "is neither a local directory"),
        ({"max_model_len": 513}, "exceeds the model's 512"),
        ({"dtype": "int8"}, "none of float32"),
        ({"dtype": "float16"}, "not supported on CPU"),
    ],
)
def test_a_choice_that_cannot_be_served_is_refused_with_the_reason(
    tiny_base: Path, config: dict[str, object], reason: str
) -> None:
    settings: dict[str, object] = {"model": str(tiny_base), "device": "cpu", **config}
    with pytest.raises(UnsupportedModel, match=reason):
        load_base_model(EngineConfig(**settings))  # type: ignore[arg-type]


def test_a_device_that_is_none_is_refused_by_name(tiny_base: Path) -> None:
    with pytest.raises(InvalidParameter, match="abacus is not one of auto, cpu and cuda"):
        load_base_model(EngineConfig(str(tiny_base), device="abacus"))
