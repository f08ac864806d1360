"""The arguments of `LLM`: the engine options of `loraplex serve`, with `_` for `-`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from ...engine.config import EngineConfig
from ...engine.errors import InvalidParameter
from ...engine.option import Option, options_of
from ...engine.proposer_list import DEFAULT_PROPOSERS, parse_proposers
from ..contract.errors import ApiError
from ..vllm_names import VALUES, explain_option

FURTHER_FIELDS = {"enable_prefix_caching": "prefix_caching"}
"""Arguments for fields of EngineConfig that are no options of a server."""
REMEDIES = {
    "enable_lora": "Omit it: this is always on. `generate(..., adapter=FOLDER)` uses an adapter.",
    "gpu_memory_utilization": "memory_gib limits the memory in GiB, not as a share. By default it "
    "is the free memory, less a reserve.",
}
"""What to do instead of an argument of vLLM, where it differs from a server's option."""


@cache
def arguments() -> Mapping[str, str]:
    """The field of EngineConfig for each argument."""
    names = {
        key.replace("-", "_"): field
        for field, option in options_of(EngineConfig).items()
        for key in (option.key(field), *option.aliases)
    }
    return {**names, **FURTHER_FIELDS}


def engine_config(model: str | Path, options: Mapping[str, Any]) -> EngineConfig:
    """The configuration of an engine. None is the default.

    Raises InvalidParameter, or ApiError for arguments that do not exist.
    """
    known = arguments()
    if unknown := [name for name in options if name not in known or name == "model"]:
        raise ApiError(
            "unsupported_parameter", "\n  ".join(map(_explain, unknown)), param=unknown[0]
        )
    fields: dict[str, Any] = {"speculation": DEFAULT_PROPOSERS}
    for name, value in options.items():
        if value is not None:
            fields[known[name]] = _field_value(name, known[name], value)
    try:
        return EngineConfig(str(model), **fields)
    except InvalidParameter as exc:
        name = next((name for name, field in known.items() if field == exc.param), exc.param)
        raise InvalidParameter(name, str(exc).removeprefix(f"{exc.param}: ")) from exc


def _field_value(name: str, field: str, value: Any) -> Any:
    """The value in the type and the unit of its field."""
    if field == "speculation":
        return parse_proposers([value] if isinstance(value, str) else value)
    option = options_of(EngineConfig).get(field, Option())
    kind = get_type_hints(EngineConfig)[field]
    try:
        if option.unit == 1:
            return msgspec.convert(value, kind)
        number = msgspec.convert(value, float)
    except msgspec.ValidationError as exc:
        raise InvalidParameter(name, _objection(field, value, kind, exc)) from exc
    if option.minimum is not None and not number >= option.minimum:
        raise InvalidParameter(name, f"must be at least {option.minimum}")
    return round(number * option.unit)


def _objection(field: str, value: Any, kind: Any, error: msgspec.ValidationError) -> str:
    """Why this is no value of the field, and which ones there are."""
    if hint := VALUES.get(field, {}).get(str(value)):
        return hint
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return f"{value!r} is not one of {', '.join(kind)}"
    return f"{value!r} has the wrong type: {error}"


def _explain(name: str) -> str:
    """What to do instead of an argument that does not exist."""
    remedy = REMEDIES.get(name) or explain_option(name.replace("_", "-"))
    if remedy:
        return f"{name}: {_as_arguments(remedy)}"
    near = get_close_matches(name, arguments(), n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{name}: LLM has no such argument.{hint}"


def _as_arguments(remedy: str) -> str:
    """The text with options as arguments of LLM."""

    def named(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        return name if name in arguments() else flag[0]

    return re.sub(r"--([a-z][a-z-]*)", named, remedy)
