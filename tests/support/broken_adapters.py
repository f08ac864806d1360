"""Adapters with typical defects of uploads, made with PEFT and PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import IA3Config, LoraConfig, PeftConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from support.models import ATTENTION_TARGETS, make_adapter, make_tiny_llama, read_adapter_config

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
SERVED = "served"


@dataclass(frozen=True)
class BrokenKind:
    """One fault, and what the server must make of it."""

    make: Callable[[Path, Path], object]
    """Writes the adapter: from a base's folder, to a folder that is not there yet."""
    expected: str
    """`SERVED`, where it is none, or the code of the rejection."""
    pointer: str = ""
    """How the pointer to the field at fault begins."""
    serving_dtype: str = "float32"
    is_base_tied: bool = False
    """Whether the base's embedding is its output head, too."""


def _adapter(base: Path, folder: Path, **lora: Any) -> Path:
    """An ordinary adapter, to be spoiled."""
    settings = {"target_modules": list(ATTENTION_TARGETS), "task_type": "CAUSAL_LM", **lora}
    return make_adapter(base, folder, seed=3, **settings)


def _renaming(rename: Callable[[str], str]) -> Callable[[Path, Path], object]:
    return _changing_tensors(lambda tensors: {rename(name): tensors[name] for name in tensors})


def _changing_tensors(
    change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]], **lora: Any
) -> Callable[[Path, Path], object]:
    def make(base: Path, folder: Path) -> None:
        path = _adapter(base, folder, **lora) / WEIGHTS
        tensors = change(load(path.read_bytes()))
        save_file({name: value.contiguous() for name, value in tensors.items()}, path)

    return make


def _setting(**fields: Any) -> Callable[[Path, Path], object]:
    def make(base: Path, folder: Path) -> None:
        config = {**read_adapter_config(_adapter(base, folder)), **fields}
        (folder / CONFIG).write_text(json.dumps(config))

    return make


def _training(**lora: Any) -> Callable[[Path, Path], object]:
    return lambda base, folder: _adapter(base, folder, **lora)


def _with_weights_file(
    write: Callable[[Path, dict[str, Tensor]], object],
) -> Callable[[Path, Path], object]:
    def make(base: Path, folder: Path) -> None:
        path = _adapter(base, folder) / WEIGHTS
        write(path, load(path.read_bytes()))

    return make


def _every(
    name_part: str, change: Callable[[Tensor], Tensor]
) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {
        name: change(value) if name_part in name else value for name, value in tensors.items()
    }


def _without_one_b(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    gone = next(name for name in tensors if "lora_B" in name)
    return {name: value for name, value in tensors.items() if name != gone}


def _diverged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value * torch.nan for name, value in tensors.items()}


def _infinite(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: (value * 1e30).half().float() for name, value in tensors.items()}


def _with_leftovers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    moments = {f"optimizer.state.{n}.exp_avg": torch.zeros(4) for n in range(2)}
    return {**tensors, **moments}


def _of_other_base(**overrides: Any) -> Callable[[Path, Path], object]:
    def make(_base: Path, folder: Path) -> None:
        other = make_tiny_llama(folder.with_name(f"{folder.name}-base"), **overrides)
        _adapter(other, folder)

    return make


def _of_gpt2(_base: Path, folder: Path) -> None:
    other = folder.with_name(f"{folder.name}-base")
    GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=260)).save_pretrained(
        other
    )
    _adapter(other, folder, target_modules=["c_attn"], fan_in_fan_out=True)


def _with_config_of_another(base: Path, folder: Path) -> None:
    _adapter(base, folder)
    other = _adapter(base, folder.with_name(f"{folder.name}-other"), r=16)
    (folder / CONFIG).write_bytes((other / CONFIG).read_bytes())


def _merged_model(base: Path, folder: Path) -> None:
    """`merge_and_unload().save_pretrained()`, renamed until it was taken for an adapter."""
    from peft import PeftModel

    config = (_adapter(base, folder) / CONFIG).read_bytes()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    merged = model.merge_and_unload()
    merged.save_pretrained(folder)
    (folder / "model.safetensors").rename(folder / WEIGHTS)
    (folder / CONFIG).write_bytes(config)


def _base_config(base: Path, folder: Path) -> None:
    """The model's own config.json in place of the adapter's."""
    _adapter(base, folder)
    (folder / CONFIG).write_bytes((base / "config.json").read_bytes())


def _other_method(config: Callable[[], PeftConfig]) -> Callable[[Path, Path], object]:
    def make(base: Path, folder: Path) -> None:
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config())
        model.save_pretrained(folder)

    return make


def _token_classifier(base: Path, folder: Path) -> None:
    """Trained to classify each token, with a head of its own."""
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(base, num_labels=2)
    lora = LoraConfig(r=4, task_type="TOKEN_CLS", target_modules=list(ATTENTION_TARGETS))
    get_peft_model(model, lora).save_pretrained(folder)


def _with_resized_vocabulary(base: Path, folder: Path) -> None:
    """Tokens of its own were added to the tokenizer before training LoRA on both ends."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(model.config.vocab_size + 3, mean_resizing=False)
    targets = [*ATTENTION_TARGETS, "embed_tokens", "lm_head"]
    get_peft_model(model, LoraConfig(r=4, target_modules=targets)).save_pretrained(folder)


def _checkpoint_folder(base: Path, folder: Path) -> None:
    """As a trainer leaves it: the adapter between everything else."""
    _adapter(base, folder)
    (folder / "checkpoint-10").mkdir()
    (folder / "checkpoint-10" / WEIGHTS).write_bytes(b"older")
    torch.save({"step": 10}, folder / "optimizer.pt")
    torch.save({"lr": 1e-4}, folder / "training_args.bin")
    (folder / "README.md").write_text("---\nlibrary_name: peft\n---\n")


def _kohya_name(name: str) -> str:
    stem = name.removeprefix(PREFIX).replace(".", "_")
    return stem.replace("_lora_A_weight", ".lora_down.weight").replace(
        "_lora_B_weight", ".lora_up.weight"
    )


def _truncate(path: Path, _tensors: dict[str, Tensor]) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _save_pickled(path: Path, tensors: dict[str, Tensor], *, is_zip: bool) -> None:
    torch.save(tensors, path, _use_new_zipfile_serialization=is_zip)


def _write_pointer(path: Path, _tensors: dict[str, Tensor]) -> None:
    path.write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4711\n"
    )


def _write_web_page(path: Path, _tensors: dict[str, Tensor]) -> None:
    path.write_text("<!DOCTYPE html>\n<html><body>Sign in to continue</body></html>\n")


def _to_fp8(value: Tensor) -> Tensor:
    return value.to(torch.float8_e4m3fn)


BROKEN: dict[str, BrokenKind] = {
    # names
    "prefix missing": BrokenKind(
        _renaming(lambda name: name.removeprefix(PREFIX)), "unbound_tensor", "model.layers"
    ),
    "prefix doubled": BrokenKind(_renaming(lambda name: PREFIX + name), "wrong_base", PREFIX * 2),
    "wrapper's prefix": BrokenKind(
        _renaming(lambda name: f"module.{name}"), "unbound_tensor", "module."
    ),
    "name of the adapter in the keys": BrokenKind(
        _renaming(lambda name: name.replace(".weight", ".default.weight")),
        "unbound_tensor",
        PREFIX,
    ),
    "names of a multimodal wrapper": BrokenKind(
        _renaming(lambda name: name.replace(PREFIX, f"{PREFIX}language_model.")),
        "wrong_base",
        f"{PREFIX}language_model",
    ),
    "names of a quantized wrapper": BrokenKind(
        _renaming(lambda name: name.replace(".lora_", ".quant_linear.lora_")), "wrong_base", PREFIX
    ),
    "upper-case names": BrokenKind(_renaming(str.upper), "unbound_tensor", "BASE_MODEL"),
    "names of an image model's trainer": BrokenKind(
        _renaming(_kohya_name), "unbound_tensor", "model_layers"
    ),
    # the base
    "another hidden size": BrokenKind(
        _of_other_base(hidden_size=128), "shape_mismatch", f"{PREFIX}model.layers.0"
    ),
    "more layers": BrokenKind(
        _of_other_base(num_hidden_layers=4), "wrong_base", f"{PREFIX}model.layers."
    ),
    "another architecture": BrokenKind(_of_gpt2, "wrong_base", f"{PREFIX}transformer.h.0"),
    "merged whole model": BrokenKind(_merged_model, "unbound_tensor", "lm_head"),
    "name of a quantized base": BrokenKind(
        _setting(base_model_name_or_path="unsloth/tiny-bnb-4bit"), SERVED
    ),
    # what is trained
    "untrained": BrokenKind(_changing_tensors(_every("lora_B", torch.zeros_like)), "no_effect"),
    "some layers only": BrokenKind(_training(layers_to_transform=[1]), SERVED),
    "regular expression as targets": BrokenKind(
        _training(target_modules=r".*\.(q|v)_proj"), SERVED
    ),
    "every linear layer": BrokenKind(_training(target_modules="all-linear"), SERVED),
    "one matrix without effect": BrokenKind(
        _changing_tensors(_every("layers.0.self_attn.q_proj.lora_B", torch.zeros_like)), SERVED
    ),
    "mixed precision": BrokenKind(_changing_tensors(_every("lora_A", Tensor.bfloat16)), SERVED),
    "folder of a trainer": BrokenKind(_checkpoint_folder, SERVED),
    "tied head": BrokenKind(
        _training(target_modules=["q_proj", "lm_head"]), SERVED, is_base_tied=True
    ),
    "tokens of its own": BrokenKind(_with_resized_vocabulary, "resized_vocabulary", PREFIX),
    "whole head": BrokenKind(
        _training(modules_to_save=["lm_head"]), "full_matrix_not_allowed", PREFIX
    ),
    "trained norms": BrokenKind(_training(modules_to_save=["norm"]), "unsupported_module", PREFIX),
    # values
    "diverged": BrokenKind(_changing_tensors(_diverged), "non_finite_weights", PREFIX),
    "overflow while saving": BrokenKind(_changing_tensors(_infinite), "non_finite_weights", PREFIX),
    "alpha that overflows half precision": BrokenKind(
        _setting(lora_alpha=1_000_000), "weights_overflow", PREFIX, "float16"
    ),
    "float8": BrokenKind(_changing_tensors(_every("lora_", _to_fp8)), "unsupported_dtype", PREFIX),
    "int8": BrokenKind(
        _changing_tensors(_every("lora_", Tensor.char)), "unsupported_dtype", PREFIX
    ),
    "float64": BrokenKind(
        _changing_tensors(_every("lora_", Tensor.double)), "unsupported_dtype", PREFIX
    ),
    # sharded training
    "weights not gathered": BrokenKind(
        _changing_tensors(_every("lora_", lambda value: value.new_zeros(0))),
        "invalid_shape",
        PREFIX,
    ),
    "weights flattened": BrokenKind(
        _changing_tensors(_every("lora_", Tensor.flatten)), "shape_mismatch", PREFIX
    ),
    "half of each matrix": BrokenKind(
        _changing_tensors(_every("lora_B", lambda value: value[: len(value) // 2])),
        "shape_mismatch",
        PREFIX,
    ),
    "missing B": BrokenKind(_changing_tensors(_without_one_b), "missing_pair", "model.layers"),
    # the file
    "pickle": BrokenKind(
        _with_weights_file(lambda path, tensors: _save_pickled(path, tensors, is_zip=True)),
        "pickle_refused",
    ),
    "old pickle": BrokenKind(
        _with_weights_file(lambda path, tensors: _save_pickled(path, tensors, is_zip=False)),
        "pickle_refused",
    ),
    "broken off download": BrokenKind(_with_weights_file(_truncate), "file_size_mismatch"),
    "pointer of a large file": BrokenKind(_with_weights_file(_write_pointer), "not_safetensors"),
    "web page": BrokenKind(_with_weights_file(_write_web_page), "not_safetensors"),
    "optimizer's state": BrokenKind(
        _changing_tensors(_with_leftovers), "unbound_tensor", "optimizer"
    ),
    # the configuration
    "wrong rank": BrokenKind(_setting(r=8), "rank_mismatch", PREFIX),
    "configuration of another adapter": BrokenKind(
        _with_config_of_another, "rank_mismatch", PREFIX
    ),
    "configuration of the base": BrokenKind(_base_config, "unsupported_feature", "/peft_type"),
    "rank 0": BrokenKind(_setting(r=0), "invalid_rank", "/r"),
    "alpha 0": BrokenKind(_setting(lora_alpha=0), "invalid_alpha", "/lora_alpha"),
    "field of a newer PEFT": BrokenKind(
        _setting(use_some_new_method=True), "unknown_config_field", "/use_some_new_method"
    ),
    "changed base": BrokenKind(
        _setting(init_lora_weights="pissa"), "unsupported_feature", "/init_lora_weights"
    ),
    "code of its own": BrokenKind(
        _setting(auto_mapping={"base_model_class": "Model", "parent_library": "modeling_mine"}),
        "code_reference_refused",
        "/auto_mapping",
    ),
    # other methods
    "prompt tuning": BrokenKind(
        _other_method(lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
        "unsupported_feature",
        "/peft_type",
    ),
    "IA3": BrokenKind(
        _other_method(
            lambda: IA3Config(
                task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]
            )
        ),
        "unsupported_feature",
        "/peft_type",
    ),
    "token classifier": BrokenKind(_token_classifier, "unsupported_feature", "/"),
}
