"""The file of `--config`: options of `loraplex serve` and `loraplex agent` in YAML.

    model: ./my-base
    max-num-seqs: 128
    speculation: [ngram, "early_exit:4"]

A key is an option without its dashes. Values are read as on the command line, so `off` is the text
`off`, and not false.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from .exit_codes import CommandFailed, ExitCode

SECRETS = ("secret", "secret-previous", "metrics-token", "oidc-client-secret")
"""Settings that have a variable alone: files are copied and committed."""
_UNSET = ("", "~", "null")


class FileValue(NamedTuple):
    """The value of a key, or the values of a list, as text."""

    value: str | list[str]
    place: str
    """`loraplex.yaml:3: max-num-seqs`."""


def read_settings_file(path: Path) -> Mapping[str, FileValue]:
    """The values by key, with hyphens; a key without a value is left out.

    Raises CommandFailed with the line if the file is not a mapping of texts and lists of texts.
    """
    root = _parse(path)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise _invalid(f"{path}: The file has to consist of lines such as `max-num-seqs: 128`.")
    found: dict[str, FileValue] = {}
    for key, value in _values(path, root):
        if key in found:
            raise _invalid(f"{value.place}: The key occurs twice.")
        found[key] = value
    return {key: value for key, value in found.items() if value.value not in _UNSET}


def _parse(path: Path) -> yaml.Node | None:
    try:
        text = path.read_text(encoding="utf-8")
        # Composed, not loaded: nothing is built from tags, and each node knows its line.
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as exc:
        raise _invalid(f"--config {path}: {exc.strerror}.") from exc
    except UnicodeDecodeError as exc:
        raise _invalid(f"--config {path}: The file is not UTF-8 text.") from exc
    except yaml.MarkedYAMLError as exc:
        line = f":{exc.problem_mark.line + 1}" if exc.problem_mark else ""
        raise _invalid(f"{path}{line}: The file is not YAML: {exc.problem}.") from exc
    except yaml.YAMLError as exc:
        raise _invalid(f"{path}: The file is not YAML.") from exc
    return node


def _values(path: Path, root: yaml.MappingNode) -> Iterator[tuple[str, FileValue]]:
    for key_node, node in root.value:
        place = f"{path}:{key_node.start_mark.line + 1}: {key_node.value}"
        key = str(key_node.value).replace("_", "-")
        if key in SECRETS:
            variable = f"LORAPLEX_{key.replace('-', '_').upper()}"
            raise _invalid(f"{place}: Secrets are not read from this file. Set {variable}.")
        yield key, FileValue(_text(node, place), place)


def _text(node: yaml.Node, place: str) -> str | list[str]:
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    items = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not all(isinstance(item, yaml.ScalarNode) for item in items):
        raise _invalid(f"{place}: The value has to be a text, a number or a list of them.")
    return [str(item.value) for item in items]


def _invalid(message: str) -> CommandFailed:
    return CommandFailed(message, ExitCode.USAGE)
