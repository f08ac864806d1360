"""One adapter per row of the PEFT feature table, made with PEFT.

All trainable values are random, so each feature has an effect. `save_base` writes a small base
model on which a feature can be trained.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from support.expert_layouts import LAYOUTS, merge_experts, write_expert_adapter
from support.models import make_tiny_llama, save_byte_tokenizer

NUM_EXPERTS = 4
INITIALIZER_RANGE = 0.1
"""Of the bases. With weights twice as wide, bf16 rounds their logits by several percent."""
TRAINED_TOKENS = [7, 3, 101]
"""Not ascending: their order in the file is the order of the rows."""

_Q_AND_V = ["q_proj", "v_proj"]
_EXPERT_PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]

_SERVED: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": "all-linear"},
    "rslora": {"use_rslora": True, "r": 6, "lora_alpha": 12},
    "rank_pattern": {
        "rank_pattern": {"q_proj": 7, "0.self_attn.v_proj": 2},
        "use_rslora": True,
    },
    "alpha_pattern": {"alpha_pattern": {"v_proj": 32, "layers.1.self_attn.q_proj": 3}},
    "initialization": {"init_lora_weights": "orthogonal"},
    "output_head": {"target_modules": [*_Q_AND_V, "lm_head"]},
    "embedding": {"target_modules": [*_Q_AND_V, "embed_tokens"]},
    "tied_adapters": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "router": {"target_modules": _Q_AND_V, "target_parameters": ["gate.weight"]},
    "experts": {"target_modules": _Q_AND_V, "target_parameters": _EXPERT_PARAMETERS},
    "lora_bias": {"lora_bias": True},
    "bias": {"bias": "all"},
    "dora": {
        "use_dora": True,
        "target_modules": [*_Q_AND_V, "down_proj", "lm_head", "embed_tokens"],
    },
    "full_matrix": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "token_rows": {"trainable_token_indices": TRAINED_TOKENS},
    "activated_lora": {
        "alora_invocation_tokens": TRAINED_TOKENS[1:],
        "target_modules": [*_Q_AND_V, "lm_head"],
    },
}
_REFUSED: dict[str, dict[str, Any]] = {
    "other_task": {"task_type": "FEATURE_EXTRACTION"},
    "changed_base": {"init_lora_weights": "pissa"},
    "pattern_expression": {"rank_pattern": {"[qv]_proj": 2}},
    "layer_replication": {"layer_replication": [[0, 2], [1, 2]]},
    "activated_extras": {"alora_invocation_tokens": [1, 2], "modules_to_save": ["lm_head"]},
    "parameter_of_a_linear_layer": {
        "target_modules": [],
        "target_parameters": ["o_proj.weight"],
    },
    "router_extras": {"bias": "all"},
    "norm_bias": {"bias": "all", "target_modules": ["c_attn"], "fan_in_fan_out": True},
    "other_modules_to_save": {"modules_to_save": ["norm"]},
    "full_matrix_not_allowed": {"modules_to_save": ["lm_head"]},
    "full_matrix_too_large": {"modules_to_save": ["lm_head"]},
    "base_weights": {"target_modules": ["embed_tokens"]},
}
_CONFIGURED: dict[str, dict[str, Any]] = {
    # PEFT needs other packages, other layers or a second adapter to train these
    "arrow": {"arrow_config": {"top_k": 2}},
    "qalora": {"use_qalora": True},
    "bdlora": {"use_bdlora": {"nblocks": 2, "target_modules_bd_a": ["q_proj"]}},
    "kasa": {"kasa_config": {}},
    "monteclora": {"monteclora_config": {}},
    "velora": {"velora_config": {}},
    "megatron": {"megatron_config": {"hidden_size": 64}},
}
_BASES = {
    "tied_adapters": "llama_tied",
    "router": "mixtral",
    "experts": "mixtral",
    "bias": "llama_bias",
    "router_extras": "gpt_oss",
    "norm_bias": "gpt2",
    "separate_experts": "mixtral",
    "stacked_experts": "mixtral",
    "expert_extras": "mixtral",
}
NUM_ADDED_TOKENS = 2
BASE_NAMES = ("llama", "llama_tied", "llama_bias", "mixtral", "gpt_oss", "gpt2")


def base_name(feature: str) -> str:
    """Which of `BASE_NAMES` this feature is trained on."""
    return _BASES.get(feature, "llama")


def save_base(name: str, path: Path) -> Path:
    """Write a small random base model of this kind, with a byte tokenizer."""
    llamas: dict[str, dict[str, Any]] = {
        "llama": {},
        "llama_tied": {"tie_word_embeddings": True},
        "llama_bias": {"attention_bias": True, "mlp_bias": True},
    }
    if name in llamas:
        make_tiny_llama(path, initializer_range=INITIALIZER_RANGE, **llamas[name])
        if name == "llama_bias":
            _draw_biases(path)
        return path
    vocab_size = save_byte_tokenizer(path)
    torch.manual_seed(0)
    _OTHER_BASES[name](vocab_size).save_pretrained(path)
    return path


def make_adapter(feature: str, directory: Path, model: PreTrainedModel, *, seed: int = 1) -> None:
    """Write the adapter of this row with PEFT, trained on `model`, which stays as it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of much of what is to be shown here
        if feature in _CONFIGURED:
            _save(model, directory, seed, {})
            LoraConfig(**{**_defaults(), **_CONFIGURED[feature]}).save_pretrained(directory)
        elif feature in _SPECIAL:
            _SPECIAL[feature](model, directory, seed)
        else:
            lora = {**_SERVED, **_REFUSED}[feature]
            copies = {} if feature == "base_weights" else {"save_embedding_layers": False}
            _save(model, directory, seed, lora, **copies)


def tuned_model(feature: str, base: PreTrainedModel, adapter: Path) -> Any:
    """The model that this row's adapter makes of `base`; PEFT may put its layers into `base`."""
    if feature == "stacked_experts":  # which PEFT does not load
        return merge_experts(base, adapter)
    if feature == "added_tokens":
        _resize(base, NUM_ADDED_TOKENS)
    if feature == "classification":  # its layers, under the base's output head
        PeftModel.from_pretrained(_classifier_of(base), adapter)
        return base
    return PeftModel.from_pretrained(base, adapter)


def _defaults() -> dict[str, Any]:
    return {"r": 4, "lora_alpha": 8, "target_modules": _Q_AND_V, "task_type": "CAUSAL_LM"}


def _save(
    model: nn.Module, directory: Path, seed: int, lora: dict[str, Any], **options: Any
) -> None:
    trained = get_peft_model(copy.deepcopy(model), LoraConfig(**{**_defaults(), **lora}))
    draw_trained_values(trained, seed)
    trained.save_pretrained(directory, **options)


def draw_trained_values(model: nn.Module, seed: int, scale: float = 0.2) -> None:
    """As if it was trained: every matrix of LoRA anew, everything else near where it was."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator) * scale
            is_matrix = "lora_" in name and "magnitude" not in name
            parameter.copy_(noise if is_matrix else parameter * (1 + noise) + noise * scale)


def _save_other_type(model: nn.Module, directory: Path, seed: int) -> None:
    trained = get_peft_model(copy.deepcopy(model), LoHaConfig(target_modules=_Q_AND_V))
    draw_trained_values(trained, seed)
    trained.save_pretrained(directory)


def _resize(model: PreTrainedModel, num_added: int) -> None:
    model.resize_token_embeddings(model.config.vocab_size + num_added, mean_resizing=False)


def _save_added_tokens(model: PreTrainedModel, directory: Path, seed: int) -> None:
    resized, num_tokens = copy.deepcopy(model), model.config.vocab_size
    _resize(resized, NUM_ADDED_TOKENS)
    added = list(range(num_tokens, num_tokens + NUM_ADDED_TOKENS))
    lora = {"trainable_token_indices": {"embed_tokens": added, "lm_head": added}}
    _save(resized, directory, seed, lora, save_embedding_layers=False)


def _classifier_of(model: Any) -> Any:
    """A classifier over the same layers."""
    classifier = AutoModelForSequenceClassification.from_config(model.config)
    classifier.model = model.model
    return classifier


def _save_classifier(model: PreTrainedModel, directory: Path, seed: int) -> None:
    _save(_classifier_of(model), directory, seed, {"task_type": "SEQ_CLS"})


def _save_resized(model: PreTrainedModel, directory: Path, seed: int) -> None:
    resized = copy.deepcopy(model)
    _resize(resized, 8)
    _save(resized, directory, seed, {"target_modules": ["embed_tokens", "lm_head"]})


def _save_separate_experts(model: PreTrainedModel, directory: Path, seed: int, **lora: Any) -> None:
    targets = {"target_modules": ["w1", "w2", "w3"], **lora}
    # With the seed itself, a token is so near between two experts that rounding decides.
    _save_stand_in(_ModelOfSeparateExperts(model.config), directory, seed + 1, targets)


def _save_expert_extras(model: PreTrainedModel, directory: Path, seed: int) -> None:
    _save_separate_experts(model, directory, seed, use_dora=True)


def _save_with_draft_head(model: PreTrainedModel, directory: Path, seed: int) -> None:
    """One that no server here has room for, so that it changes nothing."""
    _save(model, directory, seed, {})
    add_draft_head(directory, "0" * 64, torch.ones(40))


def add_draft_head(directory: Path, head_id: str, values: torch.Tensor) -> None:
    """Add a tensor to the adapter's file, as `loraplex drafts attach` does."""
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path) | {f"base_model.model.draft_head.{head_id}": values}
    save_file(tensors, path, metadata={"format": "pt"})


def _save_stacked_experts(model: PreTrainedModel, directory: Path, seed: int) -> None:
    write_expert_adapter(directory, LAYOUTS["shared-outer"], model, seed=seed)


def _save_stand_in(model: nn.Module, directory: Path, seed: int, lora: dict[str, Any]) -> None:
    _save(model, directory, seed, {**lora, "task_type": None})
    # the stand-in is no class of transformers, as PEFT noted in the configuration
    LoraConfig(**{**_defaults(), **lora}).save_pretrained(directory)


def _save_other_part(_model: PreTrainedModel, directory: Path, seed: int) -> None:
    _save_stand_in(_ModelOfTwoParts(), directory, seed, {"target_modules": ["q_proj"]})


_SPECIAL: dict[str, Callable[[Any, Path, int], None]] = {
    "other_part": _save_other_part,
    "other_type": _save_other_type,
    "added_tokens": _save_added_tokens,
    "classification": _save_classifier,
    "resized_vocabulary": _save_resized,
    "separate_experts": _save_separate_experts,
    "stacked_experts": _save_stacked_experts,
    "draft_head": _save_with_draft_head,
    "expert_extras": _save_expert_extras,
}


class _ModelOfSeparateExperts(nn.Module):
    """Mixtral's modules as they were named before transformers stacked the experts."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        wide, narrow = config.hidden_size, config.intermediate_size
        widths = {"w1": (wide, narrow), "w2": (narrow, wide), "w3": (wide, narrow)}
        expert = nn.ModuleDict({name: nn.Linear(*width) for name, width in widths.items()})
        experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(NUM_EXPERTS))
        layer = nn.ModuleDict({"block_sparse_moe": nn.ModuleDict({"experts": experts})})
        layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(config.num_hidden_layers))
        self.model = nn.ModuleDict({"layers": layers})


class _ModelOfTwoParts(nn.Module):
    """A layer for text and one for images."""

    def __init__(self) -> None:
        super().__init__()
        attention = nn.ModuleDict({"q_proj": nn.Linear(64, 64)})
        layers = nn.ModuleList([nn.ModuleDict({"self_attn": attention})])
        part = nn.ModuleDict({"layers": layers})
        self.model = nn.ModuleDict({"language_model": part, "vision_tower": copy.deepcopy(part)})


def _draw_biases(path: Path) -> None:
    """Transformers begins with biases of zero."""
    model = AutoModelForCausalLM.from_pretrained(path)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(path)


def _mixtral(vocab_size: int) -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**_small(vocab_size), num_local_experts=NUM_EXPERTS))


def _gpt_oss(vocab_size: int) -> PreTrainedModel:
    config = GptOssConfig(
        **_small(vocab_size),
        num_local_experts=NUM_EXPERTS,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    return GptOssForCausalLM(config)


def _gpt2(vocab_size: int) -> PreTrainedModel:
    tokens = {"bos_token_id": None, "eos_token_id": 0}
    config = GPT2Config(
        vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=2, n_positions=256, **tokens
    )
    return GPT2LMHeadModel(config)


def _small(vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": None,
        "eos_token_id": vocab_size - 1,
        "pad_token_id": None,
    }


_OTHER_BASES: dict[str, Callable[[int], PreTrainedModel]] = {
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "gpt2": _gpt2,
}
