"""The folders of the base models that a server loads."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ...engine.checkpoint.files import check_drafts, locate_base
from ...engine.config import EngineConfig
from ...platform.errors import InvalidValue
from ..settings import Settings


class Bases(NamedTuple):
    """Their files are checked."""

    served: Path
    reference: Path | None


def locate_bases(settings: Settings, engine_config: EngineConfig) -> Bases:
    """Check all models that will be loaded, before anything that takes time.

    Raises InvalidValue, or UnsupportedModel with what is wrong with one of them.
    """
    if settings.max_reference_kl is not None and settings.reference_base is None:
        raise InvalidValue("--max-reference-kl needs --reference-base.", param="max_reference_kl")
    served = locate_base(engine_config.model)
    reference = settings.reference_base
    check_drafts(engine_config.speculation)
    return Bases(served, None if reference is None else locate_base(reference))


def public_name(model: str, model_dir: Path) -> str:
    """A folder's or a file's name, or the hub id as it was given."""
    path = Path(model).expanduser()
    return path.stem if path.is_file() else model_dir.name if path.is_dir() else model
