"""The proposers of an engine, as `EngineConfig.speculation` has them, from what a caller wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .config import PROPOSERS, Quantization, source_of
from .errors import InvalidParameter
from .layer_numbers import parse_layers

OFF = "off"
DEFAULT_PROPOSERS = ("ngram",)
"""Unlike an engine without configuration, a server and `LLM` propose tokens."""
ARGUMENTS: dict[str, str | None] = {
    "ngram": None,
    "suffix": None,
    "draft": "MODEL",
    "early_exit": "LAYERS",
    "skip": "LAYERS",
    "medusa": "CHECKPOINT",
    "eagle": "CHECKPOINT",
    "quantized": "FORMAT",
    "mtp": None,
}
"""By source the argument of its proposers; None: no argument is allowed."""


def parse_proposers(values: Sequence[str]) -> tuple[str, ...]:
    """The entries of `EngineConfig.speculation`, each value one or several separated by commas.

    Raises InvalidParameter for errors that can be detected before the base is loaded.
    """
    entries = _joined(
        entry.strip() for value in values for entry in value.split(",") if entry.strip()
    )
    if entries == [OFF]:
        return ()
    names = []
    for entry in entries:
        name, _, argument = entry.partition(":")
        if objection := _objection(name, argument):
            raise InvalidParameter("speculation", objection)
        names.append(name)
    if len(set(names)) < len(names):
        raise InvalidParameter("speculation", "a proposer is named twice")
    return tuple(entries)


def _joined(parts: Iterable[str]) -> list[str]:
    """The entries, of parts between commas: a list of layers has commas too."""
    entries: list[str] = []
    for part in parts:
        if part[0].isdecimal() and entries and entries[-1].startswith(("skip:", "skip_tree:")):
            entries[-1] += f",{part}"
        else:
            entries.append(part)
    return entries


def _objection(name: str, argument: str) -> str | None:
    """Why this proposer is invalid; None if it is valid."""
    if name == OFF:
        return f"{OFF} cannot be combined with other proposers"
    if name not in PROPOSERS:
        return f"{name} is not one of {', '.join(PROPOSERS)}"
    source = source_of(name)
    needed = ARGUMENTS[source]
    if needed is None:
        return f"{name} takes no argument" if argument else None
    if not argument:
        return f"{name} needs an argument: {name}:{needed}"
    if source == "early_exit" and (not argument.isdecimal() or int(argument) < 1):
        return f"{name} needs a number of layers, not {argument}"
    if source == "skip":
        parse_layers(argument)
    formats = [each for each in Quantization if each is not Quantization.NONE]
    if source == "quantized" and argument not in formats:
        return f"{name} needs one of {', '.join(formats)}, not {argument}"
    return None
