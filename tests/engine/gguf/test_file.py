"""GGUF files of every architecture that is read, against the models they were written from."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from loraplex.engine.checkpoint.weights import load_config
from loraplex.engine.errors import (
    DamagedBase,
    ForeignBase,
    QuantizedBase,
    ShapesDiffer,
    TokenizerUnusable,
    UnsupportedModel,
    WeightsMissing,
    WeightsUnexpected,
)
from loraplex.engine.gguf.config import read_config
from loraplex.engine.gguf.file import GgufTensor, tensor_names
from loraplex.engine.gguf.folder import unpack_config
from loraplex.engine.text.tokenizer import Tokenizer
from support.marks import marked_slow

gguf = pytest.importorskip("gguf")

from support.gguf_files import (  # noqa: E402 - it needs gguf
    TOKENS,
    mixture,
    write_byte_tokenizer,
    write_model,
    write_settings,
)

LEGACY = mixture({"attn_q": "Q4_0", "ffn_down": "Q5_1", "token_embd": "F16"}, "Q8_0")
K_QUANTS = mixture({"ffn_down": "Q6_K", "attn_v": "Q5_K", "token_embd": "Q8_0"}, "Q4_K")
COMMON: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SMALL = {"hidden_size": 64, "intermediate_size": 96}
EXPERTS = {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def config_of(model_type: str, **settings: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**COMMON, **settings})


def gemma2_settings(writer: Any) -> None:
    writer.add_sliding_window(16)
    writer.add_attn_logit_softcapping(40.0)
    writer.add_final_logit_softcapping(20.0)


def gemma3_settings(writer: Any) -> None:
    writer.add_sliding_window(16)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


def expert_settings(writer: Any) -> None:
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(32)


def shared_expert_settings(writer: Any) -> None:
    expert_settings(writer)
    writer.add_expert_shared_feed_forward_length(48)


def yarn_settings(writer: Any) -> None:
    writer.add_rope_freq_base(1e6)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(128)


def llama3_settings(writer: Any) -> None:
    writer.add_rope_dimension_count(64)
    writer.add_rope_freq_base(500000.0)
    scaled = config_of("llama", rope_parameters=LLAMA3)
    writer.add_tensor("rope_freqs.weight", rope_factors(scaled).numpy())


def rope_factors(config: Any) -> Tensor:
    """What the scaling divides each frequency by."""
    head_dim = config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, head_dim, 2) / head_dim
    scaled: Tensor = AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq
    return torch.pow(config.rope_parameters["rope_theta"], -exponents) / scaled


def phi3_settings(writer: Any) -> None:
    writer.add_rope_dimension_count(12)
    writer.add_rope_scaling_orig_ctx_len(128)
    writer.add_rope_scaling_attn_factors(1.25)
    writer.add_sliding_window(32)
    writer.add_tensor("rope_factors_long.weight", torch.arange(1.0, 7.0).numpy())
    writer.add_tensor("rope_factors_short.weight", torch.ones(6).numpy())


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONGROPE = {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "short_factor": [1.0] * 6,
    "attention_factor": 1.25,
    "original_max_position_embeddings": 128,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
SAMPLE = {"llama", "llama-3", "qwen2-yarn", "qwen3", "gemma2", "phi3"}
"""Of the models below; `make test-slow` has the others."""
MODELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "llama": (config_of("llama"), "llama", {"kind_of": LEGACY}),
    "llama-k": (config_of("llama"), "llama", {"kind_of": K_QUANTS}),
    "llama-3": (
        config_of("llama", rope_parameters=LLAMA3),
        "llama",
        {"settings": llama3_settings},
    ),
    "llama-biased": (config_of("llama", **SMALL, attention_bias=True), "llama", {}),
    "qwen2": (config_of("qwen2"), "qwen2", {"kind_of": K_QUANTS}),
    "qwen2-yarn": (
        config_of("qwen2", **SMALL, rope_parameters=YARN),
        "qwen2",
        {"settings": yarn_settings},
    ),
    "qwen3": (
        config_of("qwen3", head_dim=32, tie_word_embeddings=True),
        "qwen3",
        {"kind_of": mixture({"attn_output": "IQ4_NL"}, "Q4_1")},
    ),
    "gemma": (
        config_of("gemma", **SMALL, head_dim=32, tie_word_embeddings=True),
        "gemma",
        {"kind_of": mixture({}, "BF16")},
    ),
    "gemma2": (
        config_of(
            "gemma2",
            **{**SMALL, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16},
            **{"attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0},
            tie_word_embeddings=True,
        ),
        "gemma2",
        {"settings": gemma2_settings, "kind_of": mixture({}, "Q8_0")},
    ),
    "gemma3": (
        config_of(
            "gemma3_text",
            **{**SMALL, "num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32},
            **{"sliding_window": 16, "rope_parameters": GEMMA3_ROPE, "tie_word_embeddings": True},
        ),
        "gemma3",
        {"settings": gemma3_settings, "kind_of": mixture({}, "Q8_0")},
    ),
    "phi3": (
        config_of(
            "phi3",
            **{**SMALL, "pad_token_id": 0, "sliding_window": 32, "rope_parameters": LONGROPE},
            original_max_position_embeddings=128,
        ),
        "phi3",
        {"settings": phi3_settings, "kind_of": mixture({}, "Q5_0")},
    ),
    "qwen2moe": (
        config_of("qwen2_moe", **EXPERTS, shared_expert_intermediate_size=48),
        "qwen2moe",
        {"settings": shared_expert_settings},
    ),
    "qwen3moe": (
        config_of("qwen3_moe", **EXPERTS, head_dim=32, norm_topk_prob=True),
        "qwen3moe",
        {"settings": expert_settings, "kind_of": mixture({"ffn_gate_exps": "Q8_0"}, "F32")},
    ),
}


def values_of(tensor: GgufTensor) -> Tensor:
    return tensor.read_quantized().dequantize() if tensor.is_quantized else tensor.read_numbers()


def loaded(config: Any, weights: dict[str, Tensor]) -> Any:
    """The model as the engine's loader makes it, in fp32."""
    kind = type(AutoModelForCausalLM.from_config(config))
    model, info = kind.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not any(info.values()), info
    return model.eval()


def logits_of(model: Any, num_tokens: int = 48) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, len(TOKENS), (1, num_tokens), generator=generator)
    with torch.no_grad():
        logits: Tensor = model(tokens).logits
    return logits


@pytest.mark.parametrize("name", marked_slow(MODELS, slow=MODELS.keys() - SAMPLE))
def test_a_file_gives_the_model_it_was_written_from(name: str, tmp_path: Path) -> None:
    config, architecture, how = MODELS[name]
    path = tmp_path / "model.gguf"
    weights = write_model(path, config, architecture, **how)
    unpack_config(path, tmp_path / "folder")
    read = load_config(tmp_path / "folder")
    tensors = tensor_names(path, read_config(path))
    found = {key: values_of(tensor) for key, tensor in tensors.items()}
    for key in weights.keys() & found.keys():
        torch.testing.assert_close(found[key], weights[key].to(found[key].dtype), atol=1e-6, rtol=0)
    expected = logits_of(loaded(config, weights))
    actual = logits_of(loaded(read, found))
    assert expected.std() > 0.05
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name", marked_slow(["llama", "llama-k", "qwen2", "gemma2"], slow=["llama-k", "qwen2"])
)
def test_transformers_reads_the_same_model(name: str, tmp_path: Path) -> None:
    config, architecture, how = MODELS[name]
    path = tmp_path / "model.gguf"
    write_model(path, config, architecture, **how)
    tensors = tensor_names(path, read_config(path))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert tensors.keys() == theirs.keys() - tied
    for key, tensor in tensors.items():
        torch.testing.assert_close(values_of(tensor).float(), theirs[key], atol=1e-6, rtol=0)


def test_quantized_rows_keep_their_blocks(tmp_path: Path) -> None:
    config, architecture, how = MODELS["llama-k"]
    write_model(tmp_path / "model.gguf", config, architecture, **how)
    tensors = tensor_names(tmp_path / "model.gguf", read_config(tmp_path / "model.gguf"))
    kinds = {tensor.kind for tensor in tensors.values() if tensor.is_quantized}
    assert kinds == {"Q4_K", "Q5_K", "Q6_K", "Q8_0"}
    assert tensors["model.layers.0.self_attn.k_proj.weight"].read_quantized().group == 32
    assert not tensors["model.norm.weight"].is_quantized


def test_rows_that_are_read_alone_are_those_of_the_model(tmp_path: Path) -> None:
    """The file has the rows of queries and keys in another order."""
    config, architecture, how = MODELS["llama-k"]
    path = tmp_path / "model.gguf"
    weights = write_model(path, config, architecture, **how)
    matrices = {k: t for k, t in tensor_names(path, read_config(path)).items() if len(t.shape) == 2}
    assert any(tensor.rotary_heads for tensor in matrices.values())
    for key, tensor in matrices.items():
        read_rows, num_rows = tensor.row_reader(), tensor.shape[0]
        for rows in (range(1), range(1, 12), range(12, num_rows)):
            found = read_rows(rows)
            values = found if isinstance(found, Tensor) else found.dequantize()
            expected = weights[key][rows.start : rows.stop].to(values.dtype)
            torch.testing.assert_close(values, expected, atol=1e-6, rtol=0)


def test_the_folder_has_the_tokenizer_and_the_end_tokens(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    unpack_config(path, tmp_path / "folder")
    tokenizer = Tokenizer(tmp_path / "folder")
    ids = tokenizer.encode("hell wö<|end|>")
    assert [TOKENS[index] for index in ids[:2]] == ["hell", "Ġw"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hell wö<|end|>"
    assert tokenizer.eos_token_ids == {TOKENS.index("<|end|>")}
    assert tokenizer.special_token_ids >= {TOKENS.index("<|user|>")}
    message = {"role": "user", "content": "he"}
    assert tokenizer.render_chat([message]) == "<|user|>he<|end|><|assistant|>"


def test_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    pieces = ("\u2581", "h", "e", "l", "o", "he", "ll", "llo", "hello", "\u2581hello")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]

    def edit(writer: Any) -> None:
        for key in [key for key in writer.kv_data[0] if key.startswith("tokenizer.")]:
            del writer.kv_data[0][key]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(pieces)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    unpack_config(edited(tmp_path, edit, vocab_size=len(tokens)), tmp_path / "folder")
    tokenizer = Tokenizer(tmp_path / "folder")
    ids = tokenizer.encode("hello ö")
    found = [tokens[index] for index in ids]
    assert found == ["<s>", "\u2581hello", "\u2581", "<0xC3>", "<0xB6>"]
    assert tokenizer.decode(ids) == "hello ö"
    assert tokenizer.eos_token_ids == {2}


def test_an_unquantized_file_has_its_own_dtype(tmp_path: Path) -> None:
    assert read_config(tiny(tmp_path))["dtype"] == "float32"
    half = tiny(tmp_path, kind_of=mixture({}, "F16"))
    assert read_config(half)["dtype"] == "float16"
    quantized = tiny(tmp_path, kind_of=mixture({}, "Q8_0"))
    assert read_config(quantized)["dtype"] == "bfloat16"


def tiny(folder: Path, architecture: str = "llama", **how: Any) -> Path:
    config = config_of("llama", **SMALL, num_hidden_layers=1)
    write_model(folder / "tiny.gguf", config, architecture, **how)
    return folder / "tiny.gguf"


def edited(folder: Path, edit: Callable[[Any], object], *, vocab_size: int = len(TOKENS)) -> Path:
    """A file of settings and an embedding only, with more metadata."""
    config = config_of("llama", **SMALL, num_hidden_layers=1)
    writer = gguf.GGUFWriter(folder / "edited.gguf", "llama")
    write_settings(writer, config)
    write_byte_tokenizer(writer)
    writer.add_tensor("token_embd.weight", torch.zeros(vocab_size, 64).numpy())
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "edited.gguf"


@pytest.mark.parametrize(
    ("edit", "error", "reason"),
    [
        (lambda w: w.add_expert_count(8), UnsupportedModel, "expert_count"),
        (lambda w: w.add_float32("llama.residual_scale", 0.5), UnsupportedModel, "residual_scale"),
        (lambda w: w.add_rope_dimension_count(8), UnsupportedModel, "rope.dimension_count"),
        (lambda w: w.add_string("llama.rope.scaling.type", "ntk"), UnsupportedModel, "ntk"),
        (
            lambda w: (
                w.add_tensor("rope_freqs.weight", torch.rand(8).numpy() + 1),
                w.add_string("llama.rope.scaling.original_context_length", "8192"),
            ),
            DamagedBase,
            "original_context_length is '8192'",
        ),
        (lambda w: w.add_uint16("split.count", 3), ForeignBase, "one of 3 parts"),
        (lambda w: w.add_string("general.type", "adapter"), ForeignBase, "GGUF adapter"),
        (lambda w: w.add_uint32("general.alignment", 48), DamagedBase, "alignment is 48"),
        (
            lambda w: w.add_tensor("x", torch.zeros(2, dtype=torch.int32).numpy()),
            QuantizedBase,
            "I32",
        ),
        (
            lambda w: w.add_tensor("rope_freqs.weight", torch.rand(8).numpy() + 1),
            UnsupportedModel,
            "rope_freqs",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    edit: Callable[[Any], object],
    error: type[UnsupportedModel],
    reason: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=reason):
        read_config(edited(tmp_path, edit))


def test_a_setting_of_zero_is_none(tmp_path: Path) -> None:
    read_config(edited(tmp_path, lambda writer: writer.add_expert_count(0)))


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="rwkv7; supported: llama"):
        read_config(tmp_path / "other.gguf")


def test_missing_and_foreign_tensors_are_named(tmp_path: Path) -> None:
    lacking = edited(tmp_path, lambda writer: None)
    with pytest.raises(WeightsMissing, match=r"blk\.0\.attn_q\.weight"):
        tensor_names(lacking, read_config(lacking))
    more = tiny(tmp_path, settings=lambda w: w.add_tensor("more", torch.zeros(2).numpy()))
    with pytest.raises(WeightsUnexpected, match="more"):
        tensor_names(more, read_config(more))
    with pytest.raises(ShapesDiffer, match=r"blk\.0\.ffn_gate\.weight"):
        tensor_names(more, {**read_config(more), "intermediate_size": 100})


def test_an_unknown_way_to_split_texts_is_refused(tmp_path: Path) -> None:
    def edit(writer: Any) -> None:
        del writer.kv_data[0]["tokenizer.ggml.pre"]
        writer.add_tokenizer_pre("elvish")

    with pytest.raises(TokenizerUnusable, match="elvish"):
        unpack_config(edited(tmp_path, edit), tmp_path / "folder")


def test_the_package_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny(tmp_path)
    config = read_config(path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedModel, match="pip install gguf"):
        tensor_names(path, config)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", ForeignBase),
        (b"PK\x03\x04" + bytes(60), ForeignBase),
        (b"version https://git-lfs.github.com/spec/v1\n", DamagedBase),
        (b"GGUF", DamagedBase),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(40), ForeignBase),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(40), ForeignBase),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 40, DamagedBase),
        (b"GGUF" + (3).to_bytes(4, "little") + bytes(40), DamagedBase),
    ],
)
def test_what_is_no_gguf_file_is_refused(
    content: bytes, error: type[UnsupportedModel], tmp_path: Path
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(error, match=r"bad\.gguf"):
        read_config(path)


def damaged(whole: bytes, randomness: random.Random, header_end: int) -> bytes:
    """The file cut off, or with a few other bytes in its header."""
    if randomness.random() < 0.2:
        return whole[: randomness.randrange(len(whole))]
    start = randomness.choice([randomness.randrange(header_end), randomness.randrange(600)])
    length = randomness.choice([1, 2, 4, 8])
    other = [b"\xff" * length, bytes(length), randomness.randbytes(length)]
    return whole[:start] + randomness.choice(other) + whole[start + length :]


def refusal(path: Path, *, completely: bool) -> UnsupportedModel | None:
    try:
        config = read_config(path)
        if completely:
            unpack_config(path, path.parent / "folder")
            tensor_names(path, config)
    except UnsupportedModel as exc:
        return exc
    return None


def test_damage_anywhere_in_the_header_is_an_error_or_harmless(tmp_path: Path) -> None:
    whole = tiny(tmp_path).read_bytes()
    end = whole.rindex(b"blk.0.") + 100  # the tensors' names are the last strings
    randomness = random.Random(5)
    path = tmp_path / "damaged.gguf"
    refusals = []
    for number in range(250):
        path.write_bytes(damaged(whole, randomness, end))
        refusals.append(refusal(path, completely=number % 3 == 0))
    reasons = [str(error) for error in refusals if error]
    assert len(reasons) > 100
    assert all("damaged.gguf" in reason for reason in reasons)


def test_a_file_that_shrinks_after_its_check_is_named(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    tensors = tensor_names(path, read_config(path))
    with path.open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(DamagedBase, match="became shorter"):
        tensors["lm_head.weight"].read()
