"""GGUF files as bases: served from the file alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from loraplex.engine.checkpoint.files import locate_base
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import BaseNotFound, DamagedBase, UnsupportedModel
from loraplex.engine.model.whole_base import load_base_model
from support.features import dense_logits
from support.paged import paged_logits
from support.quantized import logit_bound
from support.synced import record_synced

pytest.importorskip("gguf")

from support.gguf_files import TOKENS, mixture, write_model

SEQUENCES = ([5, 6, 7, 8, 9, 10, 11], [1, 2, 3])
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": len(TOKENS),
    "initializer_range": 0.1,
}
KINDS = {
    "q4_k_m": mixture({"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}, "Q4_K"),
    "q8_0": mixture({}, "Q8_0"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(("kind", "config"), [("q4_k_m", LlamaConfig), ("q8_0", Qwen2Config)])
def test_a_file_is_served_like_a_folder(kind: str, config: type, tmp_path: Path) -> None:
    path, made = tmp_path / "tiny.gguf", config(**SIZES, tie_word_embeddings=False)
    weights = write_model(path, made, made.model_type, kind_of=KINDS[kind])
    base = load_base_model(EngineConfig(str(path), device="cpu", dtype="float32"))
    assert base.quantization == ("gguf-q8_0" if kind == "q8_0" else "gguf-q4_k")
    model_class = type(AutoModelForCausalLM.from_config(made))
    plain = model_class.from_pretrained(
        None, config=made, state_dict=weights, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for tokens, ours in zip(SEQUENCES, paged_logits(base, SEQUENCES), strict=True):
        expected = dense_logits(plain, tokens)
        assert (ours - expected).abs().max() < logit_bound(base) * expected.abs().max()


def test_the_folder_is_made_once_for_each_version_of_the_file(tmp_path: Path) -> None:
    path, config = tmp_path / "tiny.gguf", LlamaConfig(**SIZES, tie_word_embeddings=False)
    write_model(path, config, "llama", kind_of=KINDS["q8_0"])
    first = locate_base(str(path))
    assert (first / "loraplex.gguf").resolve() == path.resolve()
    made = (first / "config.json").stat().st_mtime_ns
    assert locate_base(str(path)) == first
    assert (first / "config.json").stat().st_mtime_ns == made
    write_model(path, config, "llama", kind_of=KINDS["q4_k_m"])
    assert locate_base(str(path)) != first


def test_the_folders_files_are_on_the_disk_before_it_has_its_name(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = tmp_path / "tiny.gguf", LlamaConfig(**SIZES, tie_word_embeddings=False)
    write_model(path, config, "llama", kind_of=KINDS["q8_0"])
    synced = record_synced(monkeypatch)
    folder = locate_base(str(path))
    *unpacked, root = synced
    assert root == cache / "loraplex" / "gguf"
    made = unpacked[-1]
    assert made.parent.parent == root, "under its name while it is made"
    files = {path.name for path in folder.iterdir() if not path.is_symlink()}
    assert {made / name for name in files} == set(unpacked[:-1])


def test_a_damaged_file_leaves_no_folder(tmp_path: Path, cache: Path) -> None:
    path, config = tmp_path / "tiny.gguf", LlamaConfig(**SIZES, tie_word_embeddings=False)
    write_model(path, config, "llama", kind_of=KINDS["q8_0"])
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(DamagedBase):
        locate_base(str(path))
    assert not list(cache.glob("loraplex/gguf/*"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BaseNotFound, match=r"missing\.gguf"):
        locate_base(str(tmp_path / "missing.gguf"))


def test_the_package_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config = tmp_path / "tiny.gguf", LlamaConfig(**SIZES, tie_word_embeddings=False)
    write_model(path, config, "llama", kind_of=KINDS["q8_0"])
    monkeypatch.setattr("loraplex.engine.gguf.folder.find_spec", lambda _name: None)
    with pytest.raises(UnsupportedModel, match="pip install gguf"):
        locate_base(str(path))


def test_a_folder_of_gguf_files_says_to_give_the_file(tmp_path: Path) -> None:
    (tmp_path / "some.gguf").touch()
    with pytest.raises(UnsupportedModel, match=r"give the file itself, .*some\.gguf"):
        locate_base(str(tmp_path))
