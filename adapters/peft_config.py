"""Parses adapter_config.json into the fields that affect the output, or refuses it.

The file is untrusted: its size is bounded, its JSON is parsed strictly, and its keys must be known
(`peft_fields`). Nothing in it is executed: `target_modules` may be a regular expression but is
never run (tensor names decide), and the keys of `rank_pattern` and `alpha_pattern` must be literal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from .added_tokens import FIELD, AddedToken, as_fields, parse_added_tokens
from .classification import (
    LABELS_FIELD,
    PROBLEM_FIELD,
    TASK,
    ProblemType,
    parse_labels,
    parse_problem_type,
)
from .errors import AdapterRejected
from .invocation import FIELD as INVOCATION_FIELD
from .invocation import InvocationTokens, parse_invocation
from .peft_fields import check_fields, field_pointer, shown_value
from .safetensors_header import NAME_CHARACTERS
from .strict_json import DuplicateKey, MalformedJson, parse_json_object, shown

MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERNS = 4096
MAX_RANK = 4096
MAX_ALPHA = 1e6
MAX_TRAINED_TOKENS = 1 << 16

_ANYTHING_BEFORE = r".*\."

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class PeftConfig:
    """The fields of a LoRA configuration that affect the adapter's output."""

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
    uses_dora: bool = False
    uses_lora_bias: bool = False
    bias: str = "none"
    """Which biases of the base were trained: `none`, `lora_only` or `all`."""
    modules_to_save: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()
    """Suffixes of the paths of parameters that have LoRA without a module; sorted, because PEFT
    keeps a set."""
    trained_tokens: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The end of a module's path (empty for the input embedding) and the tokens whose rows were
    trained, in the order of the rows."""
    ensures_weight_tying: bool = False
    added_tokens: tuple[AddedToken, ...] = ()
    """The texts of tokens that the trainer added to the base's tokenizer."""
    is_classifier: bool = False
    """The task is classification: the adapter has a head of its own."""
    labels: tuple[str, ...] = ()
    """Of the head's outputs; empty: they have no names."""
    problem_type: ProblemType | None = None
    invocation: InvocationTokens = ()
    """The adapter acts from these tokens on; empty: on all."""
    initialization: str | None = None
    """A special one; informational."""

    def rank_of(self, name: str) -> int:
        """The configured rank of a module, or of a parameter where one is targeted."""
        return _first_match(self.rank_pattern, name, default=self.rank)

    def targets_parameter(self, path: str) -> bool:
        """Whether `target_parameters` names this parameter."""
        return any(_ends_path(target, path) for target in self.target_parameters)

    def saves_module(self, module: str) -> bool:
        """Whether `modules_to_save` names this module, by PEFT's rule: the end of its name."""
        return any(module.endswith(name) for name in self.modules_to_save)

    def tokens_of(self, module: str, *, is_input: bool) -> tuple[int, ...]:
        """The tokens whose rows of this module were trained, in the order of the rows."""
        for name, tokens in self.trained_tokens:
            if (is_input and not name) or (name and module.endswith(name)):
                return tokens
        return ()

    def scale_of(self, module: str) -> float:
        """alpha ÷ rank, or alpha ÷ √rank for rsLoRA."""
        rank = self.rank_of(module)
        alpha = _first_match(self.alpha_pattern, module, default=self.alpha)
        return alpha / math.sqrt(rank) if self.uses_rslora else alpha / rank

    def canonical(self) -> dict[str, object]:
        """The fields that affect the output or the interpretation of tensors, for the digest.

        Unset fields are omitted, so supporting a new field later changes no digest.
        """
        optional: dict[str, object] = {
            "use_dora": self.uses_dora,
            "lora_bias": self.uses_lora_bias,
            "bias": "" if self.bias == "none" else self.bias,
            "modules_to_save": list(self.modules_to_save),
            "target_parameters": list(self.target_parameters),
            "trainable_token_indices": self._token_indices(),
            "ensure_weight_tying": self.ensures_weight_tying,
            FIELD: as_fields(self.added_tokens),
            "task_type": TASK if self.is_classifier else "",
            LABELS_FIELD: {str(number): label for number, label in enumerate(self.labels)},
            PROBLEM_FIELD: self.problem_type,
            INVOCATION_FIELD: list(self.invocation),
        }
        return {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.uses_rslora,
            "rank_pattern": [list(pair) for pair in self.rank_pattern],
            "alpha_pattern": [list(pair) for pair in self.alpha_pattern],
            **{name: value for name, value in optional.items() if value},
        }

    def to_peft(self) -> dict[str, object]:
        """The fields in the format of adapter_config.json; parsing them gives this configuration,
        except for informational fields."""
        return {
            **self.canonical(),
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": dict(self.alpha_pattern),
            "base_model_name_or_path": self.base_model_name,
        }

    def _token_indices(self) -> list[int] | dict[str, list[int]]:
        by_module = {name: list(tokens) for name, tokens in self.trained_tokens}
        return by_module.get("", by_module)


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
    check_fields(fields)
    return PeftConfig(
        rank=_rank(fields.get("r"), "/r"),
        alpha=_alpha(fields.get("lora_alpha"), "/lora_alpha"),
        uses_rslora=_flag(fields, "use_rslora"),
        rank_pattern=_pattern(fields, "rank_pattern", _rank),
        alpha_pattern=_pattern(fields, "alpha_pattern", _alpha),
        target_modules=_target_modules(fields.get("target_modules")),
        base_model_name=_optional_text(fields, "base_model_name_or_path"),
        uses_dora=_flag(fields, "use_dora"),
        uses_lora_bias=_flag(fields, "lora_bias"),
        bias=_trained_biases(fields.get("bias")),
        modules_to_save=_texts(fields, "modules_to_save"),
        target_parameters=_texts(fields, "target_parameters"),
        trained_tokens=_trained_tokens(fields.get("trainable_token_indices")),
        ensures_weight_tying=_flag(fields, "ensure_weight_tying"),
        added_tokens=parse_added_tokens(fields.get(FIELD)),
        is_classifier=fields.get("task_type") == TASK,
        labels=parse_labels(fields.get(LABELS_FIELD)),
        problem_type=parse_problem_type(fields.get(PROBLEM_FIELD)),
        invocation=parse_invocation(fields.get(INVOCATION_FIELD)),
        initialization=_initialization(fields.get("init_lora_weights")),
    )


def pattern_matches(pattern: str, module: str) -> bool:
    """Whether PEFT's regular expression `(.*\\.)?(pattern)$` matches, for a literal pattern.

    A dot matches any character, `^` anchors the pattern to the whole name, and `.*\\.`, which PEFT
    writes for stacked experts, requires that something precedes it.
    """
    literal = pattern.removeprefix(_ANYTHING_BEFORE).removeprefix("^")
    start = len(module) - len(literal)
    if start < 0 or (start > 0 and (pattern.startswith("^") or module[start - 1] != ".")):
        return False
    if start == 0 and pattern.startswith(_ANYTHING_BEFORE):
        return False
    return all(want in (".", have) for want, have in zip(literal, module[start:], strict=True))


def _ends_path(end: str, path: str) -> bool:
    return path == end or path.endswith(f".{end}")


def _first_match(pattern: tuple[tuple[str, _Value], ...], module: str, default: _Value) -> _Value:
    return next((value for key, value in pattern if pattern_matches(key, module)), default)


def _rank(value: object, pointer: str) -> int:
    if type(value) is not int or value < 1:
        raise AdapterRejected(
            "invalid_rank",
            f"the rank {shown_value(value)} is not a positive integer",
            pointer=pointer,
        )
    if value > MAX_RANK:
        raise AdapterRejected(
            "rank_too_large", f"the rank {shown_value(value)} exceeds {MAX_RANK}", pointer=pointer
        )
    return value


def _alpha(value: object, pointer: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_ALPHA:
        raise AdapterRejected(
            "invalid_alpha",
            f"alpha {shown_value(value)} is not a number above 0 and at most {MAX_ALPHA:,.0f}",
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
            "config_too_large", f"{name} has {len(value)} entries", pointer=field_pointer(name)
        )
    for key in value:
        _check_literal(key, name)
    return tuple((key, parse(item, field_pointer(name, key))) for key, item in value.items())


def _check_literal(key: str, name: str) -> None:
    literal = key[len(_ANYTHING_BEFORE) :] if key.startswith(_ANYTHING_BEFORE) else key
    if literal is key:
        literal = key.removeprefix("^")
    if not literal or not NAME_CHARACTERS.issuperset(literal):
        raise AdapterRejected(
            "pattern_not_literal",
            f"{shown(key)} is a regular expression; name modules literally",
            pointer=field_pointer(name),
        )


def _trained_biases(value: object) -> str:
    if value is None:
        return "none"
    if not isinstance(value, str) or value not in ("none", "lora_only", "all"):
        raise _wrong_type("bias", "'none', 'lora_only' or 'all'")
    return value


def _texts(fields: dict[str, object], name: str) -> tuple[str, ...]:
    """A list that PEFT may keep as a set: sorted, each once."""
    value = fields.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise _wrong_type(name, "a list of strings")
    return tuple(sorted(set(value)))


def _trained_tokens(value: object) -> tuple[tuple[str, tuple[int, ...]], ...]:
    if not value:
        return ()
    by_module = value if isinstance(value, dict) else {"": value}
    if isinstance(value, dict) and "" in value:
        raise _wrong_type("trainable_token_indices", "an object from modules to lists")
    tokens = tuple((name, _token_ids(listed)) for name, listed in by_module.items())
    if sum(len(listed) for _, listed in tokens) > MAX_TRAINED_TOKENS:
        raise AdapterRejected(
            "config_too_large",
            f"more than {MAX_TRAINED_TOKENS} tokens were trained",
            pointer="/trainable_token_indices",
        )
    return tokens


def _token_ids(value: object) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or not all(type(item) is int and item >= 0 for item in value)
        or len(set(value)) != len(value)
    ):
        raise _wrong_type("trainable_token_indices", "a list of distinct token ids")
    return tuple(value)


def _initialization(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _target_modules(value: object) -> tuple[str, ...]:
    """The names, if they were listed; a text is "all-linear" or a pattern, which is never run."""
    if value is None or isinstance(value, str):
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _wrong_type("target_modules", "a string or a list of strings")
    return tuple(value)


def _flag(fields: dict[str, object], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong_type(name, "true or false")
    return bool(value)


def _optional_text(fields: dict[str, object], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise _wrong_type(name, "a string")
    return value


def _wrong_type(name: str, expected: str) -> AdapterRejected:
    return AdapterRejected(
        "malformed_config", f"{name} is not {expected}", pointer=field_pointer(name)
    )
