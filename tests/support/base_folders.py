"""Test folders for base models: valid, damaged, foreign or quantized, with the expected result.

Each is a copy of a tiny real checkpoint with one change.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from support.families import SERVED, save_family
from support.models import save_byte_tokenizer

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Tensors = dict[str, Tensor]
Make = Callable[[Path], None]

_NUM_LAYERS = 2
_TEMPLATES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": SERVED["llama"],
    "tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "gpt2": SERVED["gpt2-conv1d"],
    "gpt_neox": SERVED["gpt_neox"],
    "qwen3_moe": SERVED["qwen3_moe"],
    "deepseek_v3": SERVED["deepseek_v3-mla"],
    "glm4_moe": SERVED["glm4_moe"],
}


class BaseFolder(NamedTuple):
    """One case."""

    name: str
    template: str | None
    """What it is a copy of; None: it begins empty."""
    change: Make
    code: str | None
    """Of the refusal; None: it is served."""


class Templates:
    """Whole checkpoints, made when they are first copied."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def copy(self, name: str, path: Path) -> None:
        """Copy this template to `path`, which must not exist."""
        template = self._home / name
        if not template.exists():
            model_type, differences = _TEMPLATES[name]
            vocab_size = save_byte_tokenizer(template)
            sizes = {"num_hidden_layers": _NUM_LAYERS, "vocab_size": vocab_size}
            save_family(template, model_type, {**differences, **sizes})
        shutil.copytree(template, path, symlinks=True)


def make_base_folder(case: BaseFolder, templates: Templates, path: Path) -> None:
    """Write the folder of this case to `path`, which must not exist."""
    if case.template is None:
        path.mkdir()
    else:
        templates.copy(case.template, path)
    case.change(path)


# --- changes of files ---------------------------------------------------------------------------


def _nothing(_path: Path) -> None:
    pass


def _in_turn(*changes: Make) -> Make:
    def change(path: Path) -> None:
        for one in changes:
            one(path)

    return change


def _write(name: str, content: str | bytes | Mapping[str, Any] | list[Any]) -> Make:
    def change(path: Path) -> None:
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        (path / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return change


def _remove(*names: str) -> Make:
    def change(path: Path) -> None:
        for name in names:
            (path / name).unlink()

    return change


def _rename(name: str, new_name: str) -> Make:
    def change(path: Path) -> None:
        (path / name).rename(path / new_name)

    return change


def _truncate(name: str, *, share: float = 0.5) -> Make:
    def change(path: Path) -> None:
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[: int(len(content) * share)])

    return change


def _edit_json(name: str, *without: str, **values: Any) -> Make:
    def change(path: Path) -> None:
        content = {**json.loads((path / name).read_text()), **values}
        for key in without:
            del content[key]
        (path / name).write_text(json.dumps(content))

    return change


_config = partial(_edit_json, "config.json")


def _into_hub_cache(path: Path) -> None:
    """Files as the hub's cache keeps them: links to blobs."""
    blobs = path.parent / f"{path.name}-blobs"
    blobs.mkdir()
    for file in list(path.iterdir()):
        file.rename(blobs / file.name)
        os.symlink(blobs / file.name, file)


def _as_directory(path: Path) -> None:
    (path / WEIGHTS).unlink()
    (path / WEIGHTS).mkdir()


def _oversized_header(path: Path) -> None:
    (path / WEIGHTS).write_bytes((1 << 40).to_bytes(8, "little") + b"{}")


# --- changes of tensors -------------------------------------------------------------------------


def _tensors(edit: Callable[[Tensors], None], metadata: dict[str, str] | None = None) -> Make:
    def change(path: Path) -> None:
        tensors = load_file(path / WEIGHTS)
        edit(tensors)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, path / WEIGHTS, metadata={"format": "pt", **(metadata or {})})

    return change


def _without(*parts: str) -> Make:
    """Without the tensors whose names contain one of these."""

    def edit(tensors: Tensors) -> None:
        found = [name for name in tensors if any(part in name for part in parts)]
        assert found
        for name in found:
            del tensors[name]

    return _tensors(edit)


def _with(**shapes: tuple[int, ...]) -> Make:
    """With further tensors: names with a slash for each dot."""
    return _tensors(
        lambda tensors: tensors.update(
            {name.replace("/", "."): torch.ones(shape) for name, shape in shapes.items()}
        )
    )


def _renamed(rename: Callable[[str], str]) -> Make:
    def edit(tensors: Tensors) -> None:
        renamed = {rename(name): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    return _tensors(edit)


def _cast(dtype: torch.dtype, *, scale: str | None = None) -> Make:
    """Matrices of the decoder in this dtype, with a scale beside each if it has a name."""

    def edit(tensors: Tensors) -> None:
        for name, tensor in list(tensors.items()):
            if "_proj.weight" not in name:
                continue
            codes = tensor * 100 if not dtype.is_floating_point else tensor
            tensors[name] = codes.to(dtype)
            if scale is not None:
                tensors[name.removesuffix("weight") + scale] = torch.ones(1)

    return _tensors(edit)


def _packed(tensors: Tensors) -> None:
    """As AutoGPTQ writes 4 bits."""
    for name in [name for name in tensors if "_proj.weight" in name]:
        rows, columns = tensors.pop(name).shape
        stem = name.removesuffix("weight")
        tensors[f"{stem}qweight"] = torch.ones(columns // 8, rows, dtype=torch.int32)
        tensors[f"{stem}qzeros"] = torch.ones(1, rows // 8, dtype=torch.int32)
        tensors[f"{stem}scales"] = torch.ones(1, rows, dtype=torch.float16)


def _nf4(tensors: Tensors) -> None:
    """As bitsandbytes writes 4 bits."""
    for name in [name for name in tensors if "_proj.weight" in name]:
        tensors[name] = torch.zeros(tensors[name].numel() // 2, 1, dtype=torch.uint8)
        tensors[f"{name}.absmax"] = torch.ones(8)


def _stored_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def _classifier(tensors: Tensors) -> None:
    tensors.pop("lm_head.weight", None)
    tensors["score.weight"] = torch.ones(3, 64)


def _all_half(dtype: torch.dtype) -> Make:
    def edit(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(dtype)

    return _in_turn(_tensors(edit), _config(dtype=str(dtype).removeprefix("torch.")))


def _not_finite(tensors: Tensors) -> None:
    tensors["model.norm.weight"][3] = float("nan")


def _gpt2_masks(tensors: Tensors) -> None:
    for layer in range(4):
        stem = f"transformer.h.{layer}.attn"
        tensors[f"{stem}.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
        tensors[f"{stem}.masked_bias"] = torch.tensor(-1e4)


def _neox_masks(tensors: Tensors) -> None:
    for layer in range(_NUM_LAYERS):
        stem = f"gpt_neox.layers.{layer}.attention"
        tensors[f"{stem}.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
        tensors[f"{stem}.masked_bias"] = torch.tensor(-1e9)
        tensors[f"{stem}.rotary_emb.inv_freq"] = torch.ones(2)


def _next_token_layer(tensors: Tensors) -> None:
    """A layer behind the last for predicting the token after the next, as DeepSeek and GLM do."""
    last, extra = f"layers.{_NUM_LAYERS - 1}.", f"layers.{_NUM_LAYERS}."
    copies = {
        name.replace(last, extra): tensor.clone()
        for name, tensor in tensors.items()
        if last in name
    }
    tensors.update(copies)
    for name in ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
        tensors[f"model.{extra}{name}"] = torch.ones(64)


def _longer(tensors: Tensors) -> None:
    for name, tensor in list(tensors.items()):
        if "layers.0." in name:
            tensors[name.replace("layers.0.", f"layers.{_NUM_LAYERS}.")] = tensor.clone()


def _reshaped(tensors: Tensors) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name][:, :-1]


def _shard(path: Path) -> None:
    """Two shards and their index, as transformers writes them."""
    tensors = load_file(path / WEIGHTS)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (path / WEIGHTS).unlink()
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _misplaced(path: Path) -> None:
    """An index whose entry for one tensor names the other shard."""
    content = json.loads((path / INDEX).read_text())
    names = sorted(content["weight_map"])
    content["weight_map"][names[0]] = content["weight_map"][names[-1]]
    (path / INDEX).write_text(json.dumps(content))


def _twice(path: Path) -> None:
    """One tensor in both shards, with other values in the second."""
    first, second = sorted(path.glob("*.safetensors"))
    tensors = load_file(second)
    name, tensor = next(iter(load_file(first).items()))
    save_file({**tensors, name: tensor + 1}, second, metadata={"format": "pt"})


def _two_sets(path: Path) -> None:
    shutil.copy(path / WEIGHTS, path / "other")
    _shard(path)
    (path / "other").rename(path / WEIGHTS)


def _pickle(path: Path) -> None:
    torch.save(load_file(path / WEIGHTS), path / "pytorch_model.bin")


# --- whole folders ------------------------------------------------------------------------------


def _composite(model_type: str, *without: str) -> Make:
    """A composite model's configuration, beside some text model's weights."""

    def change(path: Path) -> None:
        content = AutoConfig.for_model(model_type).to_dict()
        for key in without:
            content.pop(key, None)
        (path / "config.json").write_text(json.dumps(content))

    return change


def _whole_gemma3(path: Path) -> None:
    """A text and image model with all its weights, as transformers saves it."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model(
        "gemma3",
        text_config={
            "hidden_size": 32,
            "head_dim": 16,
            "num_key_value_heads": 1,
            "vocab_size": 260,
            **sizes,
        },
        vision_config={"hidden_size": 16, "image_size": 28, "patch_size": 14, **sizes},
        mm_tokens_per_image=4,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    save_byte_tokenizer(path)


def _adapter(path: Path) -> None:
    config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "someone/else"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {"base_model.model.x.lora_A.weight": torch.ones(4, 4)}, path / "adapter_model.safetensors"
    )


_LFS = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
_MISSING = "base_weights_missing"
_UNEXPECTED = "base_weights_unexpected"
_QUANTIZED = "base_quantized"
_COMPOSITE = "base_composite"
_DAMAGED = "base_damaged"
_FOREIGN = "base_foreign"
_SHAPE = "base_shape_mismatch"
_TOKENIZER = "base_tokenizer"
_UNSUPPORTED = "unsupported_model"
_NEXT_LAYER = _in_turn(_tensors(_next_token_layer), _config(num_nextn_predict_layers=1))
_UNNAMED_TASK = _config("architectures")


def _served() -> Iterator[tuple[str, str | None, Make]]:
    yield "gemma3-whole", None, _whole_gemma3
    yield "whole", "llama", _nothing
    yield "tied-head-absent", "tied", _nothing
    yield "tied-head-stored", "tied", _tensors(_stored_head)
    yield (
        "tied-embedding-stored-as-head",
        "tied",
        _renamed(lambda name: name.replace("model.embed_tokens", "lm_head")),
    )
    yield "tied-without-prefix", "tied", _renamed(lambda name: name.removeprefix("model."))
    yield "sharded", "llama", _shard
    yield "bfloat16", "llama", _all_half(torch.bfloat16)
    yield "float16", "llama", _all_half(torch.float16)
    yield "metadata", "llama", _tensors(lambda _tensors: None, {"note": "made elsewhere"})
    yield "hub-cache-links", "llama", _into_hub_cache
    yield "no-architectures", "llama", _UNNAMED_TASK
    yield "quantization-config-null", "llama", _config(quantization_config=None)
    yield "packed-int4", "llama", _tensors(_packed)
    yield (
        "gptq-file-and-tensors",
        "llama",
        _in_turn(_write("quantize_config.json", {"bits": 4}), _tensors(_packed)),
    )
    yield (
        "modelopt-float8",
        "llama",
        _in_turn(
            _write("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}),
            _cast(torch.float8_e4m3fn, scale="weight_scale"),
        ),
    )
    yield (
        "float8-with-scales",
        "llama",
        _cast(torch.float8_e4m3fn, scale="weight_scale_inv"),
    )
    yield (
        "rotary-buffers",
        "llama",
        _with(
            **{f"model/layers/{layer}/self_attn/rotary_emb/inv_freq": (8,) for layer in range(2)}
        ),
    )
    yield "gpt2-causal-masks", "gpt2", _tensors(_gpt2_masks)
    yield "neox-causal-masks", "gpt_neox", _tensors(_neox_masks)
    yield "experts", "qwen3_moe", _nothing
    yield "deepseek-next-token-layer", "deepseek_v3", _NEXT_LAYER
    yield "glm-next-token-layer", "glm4_moe", _NEXT_LAYER
    yield (
        "qwen-next-token-head",
        "qwen2",
        _with(**{"mtp/fc/weight": (64, 128), "mtp/layers/0/input_layernorm/weight": (64,)}),
    )
    yield "pickle-beside-weights", "llama", _pickle
    yield "gguf-beside-weights", "llama", _write("model.gguf", b"GGUF")
    yield (
        "consolidated-beside-shards",
        "llama",
        _in_turn(
            _pickle,
            _shard,
            lambda path: save_file({"x": torch.ones(1)}, path / "consolidated.safetensors"),
        ),
    )
    yield (
        "index-of-other-shards",
        "llama",
        _write(INDEX, {"weight_map": {"x": "model-00001-of-00009.safetensors"}}),
    )


def _lacking() -> Iterator[tuple[str, str, Make, str]]:
    yield "layer-missing", "llama", _without("layers.1."), _MISSING
    yield "untied-head-missing", "llama", _without("lm_head"), _MISSING
    yield "embedding-missing", "llama", _without("embed_tokens"), _MISSING
    yield "tied-embedding-missing", "tied", _without("embed_tokens"), _MISSING
    yield "norm-missing", "llama", _without("model.norm"), _MISSING
    yield "bias-missing", "qwen2", _without("q_proj.bias"), _MISSING
    yield "no-tensors", "llama", _tensors(lambda tensors: tensors.clear()), _MISSING
    yield "another-prefix", "llama", _renamed(lambda name: f"student.{name}"), _MISSING
    yield "untied-without-prefix", "llama", _renamed(lambda name: f"x{name}"), _MISSING
    yield "an-expert-missing", "qwen3_moe", _without("experts.1."), _MISSING
    yield "an-experts-matrix-missing", "qwen3_moe", _without("experts.3.up_proj"), _MISSING
    yield "the-last-expert-missing", "qwen3_moe", _without("experts.3."), _SHAPE
    yield "router-bias-missing", "deepseek_v3", _without("e_score_correction_bias"), _MISSING
    yield (
        "classifier",
        "llama",
        _in_turn(_tensors(_classifier), _config(architectures=["LlamaForSequenceClassification"])),
        _FOREIGN,
    )
    yield "classifier-unnamed", "llama", _in_turn(_tensors(_classifier), _UNNAMED_TASK), _MISSING
    yield "tied-classifier", "tied", _in_turn(_tensors(_classifier), _UNNAMED_TASK), _UNEXPECTED
    yield "more-layers-than-configured", "llama", _tensors(_longer), _UNEXPECTED
    yield "next-token-layer-undeclared", "llama", _tensors(_next_token_layer), _UNEXPECTED
    yield "value-head", "llama", _with(**{"v_head/summary/weight": (1, 64)}), _UNEXPECTED
    yield (
        "bias-undeclared",
        "llama",
        _with(**{"model/layers/0/self_attn/q_proj/bias": (64,)}),
        _UNEXPECTED,
    )
    yield (
        "adapter-left-inside",
        "llama",
        _with(**{"model/layers/0/self_attn/q_proj/lora_A/weight": (4, 64)}),
        _UNEXPECTED,
    )


def _quantized() -> Iterator[tuple[str, str, Make, str]]:
    named = {
        "gptq-config": _config(quantization_config=_GPTQ),
        "compressed-tensors-config": _config(compression_config={"format": "pack-quantized"}),
        "mlx-config": _config(quantization={"bits": 4, "group_size": 64}),
        "gptq-file": _write("quantize_config.json", {"bits": 4}),
        "awq-file": _write("quant_config.json", {"w_bit": 4}),
        "modelopt-file": _write("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}),
        "hqq-config": _config(quantization_config={"quant_method": "hqq"}),
        "gptq-marlin": _in_turn(
            _config(quantization_config={**_GPTQ, "checkpoint_format": "marlin"}),
            _tensors(_packed),
        ),
        "bare-int8": _cast(torch.int8),
        "bare-uint8": _cast(torch.uint8),
        "bare-int32": _cast(torch.int32),
        "bare-float8": _cast(torch.float8_e4m3fn),
        "bare-float8-e5m2": _cast(torch.float8_e5m2),
        "nf4": _tensors(_nf4),
        "scales-alone": _cast(torch.bfloat16, scale="weight_scale"),
        "input-scales-alone": _cast(torch.float32, scale="input_scale"),
    }
    for name, change in named.items():
        yield name, "llama", change, _QUANTIZED


def _composites() -> Iterator[tuple[str, str | None, Make, str]]:
    yield (
        "gemma3-defaults-unwritten",
        "llama",
        _composite("gemma3", "text_config", "vision_config"),
        _COMPOSITE,
    )
    for model_type in (
        *("gemma3n", "gemma4", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "mistral3"),
        *("llama4", "mllama", "phi4_multimodal", "qwen2_audio"),
    ):
        yield model_type, "llama", _composite(model_type), _COMPOSITE


def _damaged() -> Iterator[tuple[str, str | None, Make, str]]:
    yield "half-a-file", "llama", _truncate(WEIGHTS), _DAMAGED
    yield "last-bytes-missing", "llama", _truncate(WEIGHTS, share=0.999), _DAMAGED
    yield "empty-file", "llama", _write(WEIGHTS, b""), _DAMAGED
    yield "garbage", "llama", _write(WEIGHTS, b"\xff" * 4096), _DAMAGED
    yield "oversized-header", "llama", _oversized_header, _DAMAGED
    yield "lfs-pointer", "llama", _write(WEIGHTS, _LFS), _DAMAGED
    yield "a-folder-for-a-file", "llama", _as_directory, _DAMAGED
    packed = _tensors(_packed)
    yield "packed-without-scales", "llama", _in_turn(packed, _without("k_proj.scales")), _DAMAGED
    yield "packed-as-floats", "llama", _in_turn(packed, _all_half(torch.float16)), _DAMAGED
    yield "int8-with-few-scales", "llama", _cast(torch.int8, scale="SCB"), _SHAPE
    yield "not-finite", "llama", _tensors(_not_finite), _DAMAGED
    shard = "model-00002-of-00002.safetensors"
    for name, change in {
        "shard-missing": _remove(shard),
        "half-a-shard": _truncate(shard),
        "index-damaged": _truncate(INDEX),
        "index-without-map": _write(INDEX, {"metadata": {}}),
        "index-leads-elsewhere": _edit_json(INDEX, weight_map={"x": "../model.safetensors"}),
        "index-misplaces": _misplaced,
        "tensor-twice": _twice,
    }.items():
        yield name, "llama", _in_turn(_shard, change), _DAMAGED
    yield "two-sets-of-weights", "llama", _two_sets, _DAMAGED
    yield "config-damaged", "llama", _truncate("config.json"), _DAMAGED
    yield "config-not-an-object", "llama", _write("config.json", ["llama"]), _DAMAGED
    yield "config-not-text", "llama", _write("config.json", b"\xff\xfe\x00"), _DAMAGED
    yield "generation-config-damaged", "llama", _truncate("generation_config.json"), _DAMAGED
    yield "end-token-not-a-number", "llama", _config(eos_token_id="</s>"), _DAMAGED
    yield "tokenizer-config-damaged", "llama", _truncate("tokenizer_config.json"), _DAMAGED
    yield "tokenizer-damaged", "llama", _truncate("tokenizer.json"), _TOKENIZER
    yield (
        "tokenizer-missing",
        "llama",
        _remove("tokenizer.json"),
        _TOKENIZER,
    )
    yield (
        "tokenizer-sentencepiece",
        "llama",
        _in_turn(_remove("tokenizer.json"), _write("tokenizer.model", b"\n\x0e\n\x05<unk>")),
        _TOKENIZER,
    )
    yield "wrong-shape", "llama", _tensors(_reshaped), _SHAPE
    yield "config-of-another-size", "llama", _config(intermediate_size=128), _SHAPE
    yield "config-of-another-vocabulary", "llama", _config(vocab_size=320), _SHAPE


def _foreign() -> Iterator[tuple[str, str | None, Make, str]]:
    yield "empty-folder", None, _nothing, _FOREIGN
    yield "peft-adapter", None, _adapter, _FOREIGN
    yield "adapter-beside-base", "llama", _adapter, _FOREIGN
    yield "gguf-alone", None, _write("model-q4.gguf", b"GGUF"), _FOREIGN
    yield (
        "gguf-beside-config",
        "llama",
        _in_turn(_remove(WEIGHTS), _write("model-q4.gguf", b"GGUF")),
        _FOREIGN,
    )
    yield "pickle-only", "llama", _in_turn(_pickle, _remove(WEIGHTS)), _FOREIGN
    yield "no-weights", "llama", _remove(WEIGHTS), _FOREIGN
    yield "other-file-name", "llama", _rename(WEIGHTS, "consolidated.safetensors"), _FOREIGN
    yield "config-without-type", "llama", _config("model_type"), _FOREIGN
    yield "unknown-type", "llama", _config(model_type="megabrain"), _UNSUPPORTED
    yield (
        "own-code",
        "llama",
        _config(model_type="megabrain", auto_map={"AutoModelForCausalLM": "modeling.MegaBrain"}),
        _UNSUPPORTED,
    )
    yield "encoder-decoder", "llama", _config(model_type="t5", architectures=None), _UNSUPPORTED
    yield "heads-not-a-number", "llama", _config(num_attention_heads="many"), _UNSUPPORTED
    yield "heads-do-not-divide", "llama", _config("head_dim", num_attention_heads=7), _UNSUPPORTED
    yield "no-heads", "llama", _config("head_dim", num_attention_heads=0), _UNSUPPORTED
    yield "negative-layers", "llama", _config(num_hidden_layers=-1), _UNEXPECTED


BASE_FOLDERS: tuple[BaseFolder, ...] = (
    *(BaseFolder(*case, None) for case in _served()),
    *(
        BaseFolder(*case)
        for kind in (_lacking, _quantized, _composites, _damaged, _foreign)
        for case in kind()
    ),
)
