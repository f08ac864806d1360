"""adapter_config.json, reduced to what decides the adapter's output, or refused.

The file is a tenant's: its size is bounded, its JSON strict, its keys known. What PEFT can express
and is not served is refused by name, never ignored. Nothing in it is executed: `target_modules` may
be a regular expression and is not run (tensor names decide), and the keys of `rank_pattern` and
`alpha_pattern` must be literal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from .errors import AdapterRejected
from .safetensors_header import NAME_CHARACTERS
from .strict_json import DuplicateKey, MalformedJson, escaped, parse_json_object, shown

MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERNS = 4096
MAX_RANK = 4096
MAX_ALPHA = 1e6

_READ = {
    "peft_type",
    "task_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "bias",
    "init_lora_weights",
    "base_model_name_or_path",
    "auto_mapping",
    "megatron_core",
}
_WITHOUT_EFFECT = {
    # of training, of initialization, or of merging into the base's weights
    "peft_version",
    "revision",
    "inference_mode",
    "lora_dropout",
    "fan_in_fan_out",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
    "ensure_weight_tying",
}
_MERGE = "merge it into its own base model instead"
_UNSUPPORTED: Mapping[str, str] = {
    "use_dora": "DoRA is not served; train without use_dora",
    "lora_bias": "a bias on lora_B is not served; train with lora_bias=False",
    "modules_to_save": "whole trained modules are not served; train without modules_to_save",
    "trainable_token_indices": "trained token embeddings are not served; train without them",
    "target_parameters": "LoRA on bare parameters (MoE experts) is not served; target modules only",
    "layer_replication": f"replicated layers are not served; {_MERGE}",
    "alora_invocation_tokens": "activated LoRA is not served; train an ordinary LoRA",
    "arrow_config": "Arrow routing is not served; push the adapters one by one",
    "use_qalora": f"QALoRA is not served; {_MERGE}",
    "use_bdlora": f"BD-LoRA is not served; {_MERGE}",
    "kasa_config": f"KaSA is not served; {_MERGE}",
    "monteclora_config": f"MonteCLoRA is not served; {_MERGE}",
    "velora_config": f"VeLoRA checkpoints are not served; {_MERGE}",
}
_CODE_REFERENCES = {"auto_map", "runtime_config", "megatron_config"}
_CODE_REFERENCE_PREFIX = "custom_"
# These leave the base as it is; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change it.
_HARMLESS_INITIALIZATIONS = {"gaussian", "orthogonal", "eva", "mica"}

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class PeftConfig:
    """What a LoRA configuration says about the adapter's output."""

    rank: int
    alpha: float
    uses_rslora: bool
    rank_pattern: tuple[tuple[str, int], ...]
    """Module pattern to rank in the file's order: the first that matches counts."""
    alpha_pattern: tuple[tuple[str, float], ...]
    target_modules: tuple[str, ...] = ()
    """The literal names the trainer listed; informational."""
    base_model_name: str | None = None
    """`base_model_name_or_path`; informational."""

    def rank_of(self, module: str) -> int:
        return _first_match(self.rank_pattern, module, default=self.rank)

    def scale_of(self, module: str) -> float:
        """alpha ÷ rank, or alpha ÷ √rank for rsLoRA."""
        rank = self.rank_of(module)
        alpha = _first_match(self.alpha_pattern, module, default=self.alpha)
        return alpha / math.sqrt(rank) if self.uses_rslora else alpha / rank

    def canonical(self) -> dict[str, object]:
        """The fields that decide the output, for the digest."""
        return {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.uses_rslora,
            "rank_pattern": [list(pair) for pair in self.rank_pattern],
            "alpha_pattern": [list(pair) for pair in self.alpha_pattern],
        }


def parse_peft_config(data: bytes) -> PeftConfig:
    """Parse the content of adapter_config.json.

    Raises AdapterRejected whose pointer is the JSON pointer of the field at fault.
    """
    if len(data) > MAX_CONFIG_BYTES:
        raise AdapterRejected("config_too_large", f"the configuration has {len(data)} bytes")
    try:
        fields = parse_json_object(data)
    except DuplicateKey as exc:
        raise AdapterRejected("duplicate_key", f"in the configuration, {exc}") from exc
    except MalformedJson as exc:
        raise AdapterRejected("malformed_config", f"the configuration is malformed: {exc}") from exc
    _check_peft_type(fields.get("peft_type"))
    for name, value in fields.items():
        _check_served(name, value)
    _check_variant(fields)
    return PeftConfig(
        rank=_rank(fields.get("r"), "/r"),
        alpha=_alpha(fields.get("lora_alpha"), "/lora_alpha"),
        uses_rslora=_flag(fields, "use_rslora"),
        rank_pattern=_pattern(fields, "rank_pattern", _rank),
        alpha_pattern=_pattern(fields, "alpha_pattern", _alpha),
        target_modules=_target_modules(fields.get("target_modules")),
        base_model_name=_optional_text(fields, "base_model_name_or_path"),
    )


def pattern_matches(pattern: str, module: str) -> bool:
    """Whether PEFT's regular expression `(.*\\.)?(pattern)$` matches, for a literal pattern.

    A dot matches any character there, and `^` binds the pattern to the whole name.
    """
    literal = pattern.removeprefix("^")
    start = len(module) - len(literal)
    if start < 0 or (start > 0 and (pattern.startswith("^") or module[start - 1] != ".")):
        return False
    return all(want in (".", have) for want, have in zip(literal, module[start:], strict=True))


def _first_match(pattern: tuple[tuple[str, _Value], ...], module: str, default: _Value) -> _Value:
    return next((value for key, value in pattern if pattern_matches(key, module)), default)


def _check_peft_type(peft_type: object) -> None:
    if peft_type != "LORA":
        raise AdapterRejected(
            "unsupported_feature",
            f"the adapter's type is {_shown(peft_type)}; only LORA is served",
            pointer="/peft_type",
        )


def _check_served(name: str, value: object) -> None:
    """Refuse a field that is set and is not served."""
    if name in _READ or name in _WITHOUT_EFFECT or _is_unset(value):
        return
    if name in _CODE_REFERENCES or name.startswith(_CODE_REFERENCE_PREFIX):
        raise AdapterRejected(
            "code_reference_refused", f"{shown(name)} refers to code", pointer=_pointer(name)
        )
    if name in _UNSUPPORTED:
        raise AdapterRejected("unsupported_feature", _UNSUPPORTED[name], pointer=_pointer(name))
    raise AdapterRejected(
        "unknown_config_field", f"the field {shown(name)} is not known", pointer=_pointer(name)
    )


def _is_unset(value: object) -> bool:
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def _check_variant(fields: dict[str, object]) -> None:
    _check_auto_mapping(fields.get("auto_mapping"))
    if fields.get("megatron_core") not in (None, "megatron.core"):
        raise AdapterRejected(
            "code_reference_refused", "megatron_core refers to code", pointer="/megatron_core"
        )
    if fields.get("bias", "none") not in ("none", None):
        raise AdapterRejected(
            "unsupported_feature",
            "trained biases are not served; train with bias='none'",
            pointer="/bias",
        )
    if fields.get("task_type") not in (None, "CAUSAL_LM"):
        raise AdapterRejected(
            "unsupported_feature",
            f"the task {_shown(fields['task_type'])} is not served; only CAUSAL_LM is",
            pointer="/task_type",
        )
    _check_initialization(fields.get("init_lora_weights"))


def _check_auto_mapping(value: object) -> None:
    """PEFT names the base's class here when no task type was given; any other use is refused."""
    if value is None:
        return
    if (
        isinstance(value, dict)
        and value.keys() <= {"base_model_class", "parent_library", "unsloth_fixed"}
        and str(value.get("parent_library")).startswith("transformers.models.")
    ):
        return
    raise AdapterRejected(
        "code_reference_refused",
        "auto_mapping names something outside transformers",
        pointer="/auto_mapping",
    )


def _check_initialization(value: object) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str) and value.lower() in _HARMLESS_INITIALIZATIONS:
        return
    raise AdapterRejected(
        "unsupported_feature",
        f"the initialization {_shown(value)} changed the base's weights; convert the adapter with "
        "save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        pointer="/init_lora_weights",
    )


def _rank(value: object, pointer: str) -> int:
    if type(value) is not int or value < 1:
        raise AdapterRejected(
            "invalid_rank", f"the rank {_shown(value)} is not a positive integer", pointer=pointer
        )
    if value > MAX_RANK:
        raise AdapterRejected(
            "rank_too_large", f"the rank {_shown(value)} exceeds {MAX_RANK}", pointer=pointer
        )
    return value


def _alpha(value: object, pointer: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_ALPHA:
        raise AdapterRejected(
            "invalid_alpha",
            f"alpha {_shown(value)} is not a number above 0 and at most {MAX_ALPHA:,.0f}",
            pointer=pointer,
        )
    return float(value)


def _pattern(
    fields: dict[str, object], name: str, parse: Callable[[object, str], _Value]
) -> tuple[tuple[str, _Value], ...]:
    value = fields.get(name)
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise _wrong_type(name, "an object")
    if len(value) > MAX_PATTERNS:
        raise AdapterRejected(
            "config_too_large", f"{name} has {len(value)} entries", pointer=_pointer(name)
        )
    for key in value:
        _check_literal(key, name)
    return tuple((key, parse(item, _pointer(name, key))) for key, item in value.items())


def _check_literal(key: str, name: str) -> None:
    literal = key.removeprefix("^")
    if not literal or not NAME_CHARACTERS.issuperset(literal):
        raise AdapterRejected(
            "pattern_not_literal",
            f"{shown(key)} is a regular expression; name modules literally",
            pointer=_pointer(name),
        )


def _target_modules(value: object) -> tuple[str, ...]:
    """The names, if they were listed; a text is "all-linear" or a pattern, which is never run."""
    if value is None or isinstance(value, str):
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _wrong_type("target_modules", "a text or a list of texts")
    return tuple(value)


def _flag(fields: dict[str, object], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong_type(name, "true or false")
    return bool(value)


def _optional_text(fields: dict[str, object], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise _wrong_type(name, "a text")
    return value


def _wrong_type(name: str, expected: str) -> AdapterRejected:
    return AdapterRejected("malformed_config", f"{name} is not {expected}", pointer=_pointer(name))


def _pointer(*parts: str) -> str:
    return "".join(f"/{escaped(part)}" for part in parts)


def _shown(value: object) -> str:
    return shown(value) if isinstance(value, str) else escaped(str(value))
