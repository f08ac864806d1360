"""The list of adapters that `vllm serve --lora-modules` takes.

An entry is `NAME=PATH`, or a JSON object with `name`, `path` and perhaps `base_model_name`. A path
that is not on this machine and looks like OWNER/NAME is in the Hugging Face Hub. Source: the option
`--lora-modules` of vLLM 0.11 (docs.vllm.ai, "LoRA Adapters").
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from .exit_codes import CommandFailed, ExitCode

OPTION = "lora-modules"
_FIELDS = frozenset({"name", "path", "base_model_name"})


class LoraModule(NamedTuple):
    """An adapter to import."""

    name: str
    source: str
    base_model_name: str | None


def parse_modules(words: Iterable[str]) -> list[LoraModule]:
    """The adapters of entries, and of files with entries. Raises CommandFailed.

    A file holds a JSON or YAML list of entries, or a mapping with such a list under `lora-modules`,
    as a configuration file of vLLM.
    """
    found = [module for word in words for module in _parse_word(word)]
    seen: set[str] = set()
    for module in found:
        if module.name in seen:
            raise _invalid(f"The name {module.name!r} is there twice.")
        seen.add(module.name)
    return found


def _parse_word(word: str) -> Iterator[LoraModule]:
    if word.lstrip().startswith(("{", "[")):
        yield from _parse_entries(word, _parse_json(word))
    elif Path(word).is_file():
        yield from _parse_entries(word, _read_file(Path(word)))
    elif "=" in word:
        yield _parse_pair(word)
    else:
        raise _invalid(f"{word!r} is neither a file nor NAME=PATH nor a JSON object.")


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise _invalid(f"{text!r} is not JSON: {exc}") from exc


def _read_file(path: Path) -> Any:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except (yaml.YAMLError, OSError, UnicodeDecodeError, RecursionError) as exc:
        raise _invalid(f"{path} cannot be read: {exc}") from exc
    if not isinstance(content, dict):
        return content
    for option in (OPTION, OPTION.replace("-", "_")):
        if option in content:
            return content[option]
    return content


def _parse_entries(where: str, content: Any) -> Iterator[LoraModule]:
    entries = content if isinstance(content, list) else [content]
    for entry in entries:
        if isinstance(entry, str):
            yield from (
                [_parse_pair(entry)]
                if not entry.startswith("{")
                else _parse_entries(where, _parse_json(entry))
            )
        else:
            yield _parse_object(where, entry)


def _parse_pair(text: str) -> LoraModule:
    name, has_path, path = text.partition("=")
    if not (name and has_path and path):
        raise _invalid(f"{text!r} is not NAME=PATH.")
    return LoraModule(name, _as_source(path), None)


def _parse_object(where: str, entry: Any) -> LoraModule:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise _invalid(f"{where}: an entry is not NAME=PATH, nor an object with texts.")
    if unknown := entry.keys() - _FIELDS:
        raise _invalid(f"{where}: unknown fields {', '.join(sorted(map(str, unknown)))}.")
    if not entry.get("name") or not entry.get("path"):
        raise _invalid(f"{where}: an entry has no name or no path.")
    return LoraModule(entry["name"], _as_source(entry["path"]), entry.get("base_model_name"))


def _as_source(path: str) -> str:
    """The path as a source of a push."""
    is_plain = "://" not in path and not path.startswith((".", "/", "~"))
    if is_plain and path.count("/") == 1 and not Path(path).exists():
        return f"hf://{path}"
    return path


def _invalid(message: str) -> CommandFailed:
    return CommandFailed(message, ExitCode.USAGE)
