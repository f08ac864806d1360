"""Every field of PEFT's LoRA configuration: used, without effect on the output, or refused.

Unsupported features are refused by name, never ignored. Unknown fields are refused too.
"""

from __future__ import annotations

from collections.abc import Mapping

from .added_tokens import FIELD
from .classification import FIELDS as CLASSIFIER_FIELDS
from .classification import TASK as CLASSIFICATION
from .errors import AdapterRejected
from .formats import refusal_message
from .invocation import FIELD as INVOCATION_FIELD
from .strict_json import escaped, shown

READ = frozenset(
    {
        "peft_type",
        "task_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "target_parameters",
        "bias",
        "use_dora",
        "lora_bias",
        "modules_to_save",
        "trainable_token_indices",
        "ensure_weight_tying",
        "init_lora_weights",
        "base_model_name_or_path",
        "auto_mapping",
        "megatron_core",
        FIELD,
        INVOCATION_FIELD,
        *CLASSIFIER_FIELDS,
    }
)
WITHOUT_EFFECT = frozenset(
    {
        # for training, initialization, or merging into the base's weights
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
    }
)
UNSUPPORTED: Mapping[str, str] = {
    "layer_replication": "layer_replication",
    "arrow_config": "arrow",
    "use_qalora": "qalora",
    "use_bdlora": "bdlora",
    "kasa_config": "kasa",
    "monteclora_config": "monteclora",
    "velora_config": "velora",
}
"""Field to its row in `formats.REFUSED`."""
CODE_REFERENCES = frozenset({"auto_map", "runtime_config", "megatron_config"})
_CODE_REFERENCE_PREFIX = "custom_"
# These leave the base as it is; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change it.
_HARMLESS_INITIALIZATIONS = {"gaussian", "orthogonal", "eva", "mica"}


def check_fields(fields: Mapping[str, object]) -> None:
    """Refuse a configuration whose fields ask for something that is not served.

    Raises AdapterRejected pointing to the field.
    """
    if fields.get("peft_type") != "LORA":
        raise _unsupported("peft_type", "other_type", fields.get("peft_type"))
    for name, value in fields.items():
        _check_field(name, value)
    _check_task(fields)
    if fields.get("megatron_core") not in (None, "megatron.core"):
        raise AdapterRejected(
            "code_reference_refused",
            f"megatron_core refers to code: {refusal_message('megatron')}",
            pointer="/megatron_core",
        )
    if fields.get("use_dora") and fields.get("lora_bias"):
        raise _unsupported("lora_bias", "dora_with_lora_bias")
    _check_auto_mapping(fields.get("auto_mapping"))
    _check_initialization(fields.get("init_lora_weights"))


def _check_task(fields: Mapping[str, object]) -> None:
    task = fields.get("task_type")
    if task not in (None, "CAUSAL_LM", CLASSIFICATION):
        raise _unsupported("task_type", "other_task", task)
    for name in CLASSIFIER_FIELDS:
        if task != CLASSIFICATION and fields.get(name) is not None:
            raise AdapterRejected(
                "config_contradiction",
                f"{name} has no effect without the task_type {CLASSIFICATION}",
                pointer=field_pointer(name),
            )


def field_pointer(*parts: str) -> str:
    """The JSON pointer of a field, safe to show."""
    return "".join(f"/{escaped(part)}" for part in parts)


def shown_value(value: object) -> str:
    """An untrusted field value, shortened for a message."""
    return shown(value) if isinstance(value, str) else escaped(str(value))


def _check_field(name: str, value: object) -> None:
    """Refuse a field that is set and is not served.

    An unknown field is unset only if it is null or false: an empty object may turn a feature on.
    """
    if name in READ or name in WITHOUT_EFFECT or value is None or value is False:
        return
    if name in UNSUPPORTED:  # even an empty object turns some of them on
        raise _unsupported(name, UNSUPPORTED[name])
    if name in CODE_REFERENCES and isinstance(value, str | list | dict) and not value:
        return
    if name in CODE_REFERENCES or name.startswith(_CODE_REFERENCE_PREFIX):
        raise AdapterRejected(
            "code_reference_refused", f"{shown(name)} refers to code", pointer=field_pointer(name)
        )
    raise AdapterRejected(
        "unknown_config_field",
        f"the field {shown(name)} is not known",
        pointer=field_pointer(name),
    )


def _unsupported(field: str, feature: str, value: object = None) -> AdapterRejected:
    named = field if value is None else f"{field} {shown_value(value)}"
    return AdapterRejected(
        "unsupported_feature",
        f"{named} is not supported: {refusal_message(feature)}",
        pointer=field_pointer(field),
    )


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
    raise _unsupported("init_lora_weights", "changed_base", value)
