"""Creates the proposers that a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..config import PROPOSERS, EngineConfig
from ..errors import InvalidParameter
from ..execution.runner import ModelRunner
from ..model.base_model import BaseModel
from .ngram import NgramProposer
from .proposer import Proposer
from .self_draft_opening import SELF_DRAFT_OPENERS
from .suffix import SuffixProposer

Opener = Callable[[str, EngineConfig, BaseModel, ModelRunner], Proposer]
"""Its first argument is the text after the colon of the configuration, empty if there is none."""


def _without_argument(kind: Callable[[], Proposer]) -> Opener:
    def opened(argument: str, *_: object) -> Proposer:
        proposer = kind()
        if argument:
            raise InvalidParameter("speculation", f"{proposer.name} takes no argument")
        return proposer

    return opened


def _opened(proposer: Proposer) -> Opener:
    return lambda *_: proposer


OPENERS: dict[str, Opener] = {
    "ngram": _without_argument(NgramProposer),
    "suffix": _without_argument(SuffixProposer),
    **SELF_DRAFT_OPENERS,
}


def open_proposers(
    config: EngineConfig,
    *,
    base: BaseModel,
    runner: ModelRunner,
    loaded: Iterable[Proposer] = (),
) -> list[Proposer]:
    """Raises InvalidParameter for unknown or repeated names.

    `loaded`: proposers with much memory, which were opened before it was divided.
    """
    openers = OPENERS | {proposer.name: _opened(proposer) for proposer in loaded}
    proposers: list[Proposer] = []
    for entry in config.speculation:
        name, _, argument = entry.partition(":")
        if name not in openers:
            known = ", ".join(sorted({*OPENERS, *PROPOSERS}))
            raise InvalidParameter("speculation", f"{name} is not one of {known}")
        if any(proposer.name == name for proposer in proposers):
            raise InvalidParameter("speculation", f"{name} is given twice")
        proposers.append(openers[name](argument, config, base, runner))
    return proposers
