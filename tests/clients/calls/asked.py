"""What every client asks for, and how its script prints what came back."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

MODEL = "sql"
MAX_TOKENS = 96


class Server(NamedTuple):
    """The first three arguments of a script: where to ask, as whom, and what."""

    url: str
    key: str
    prompt: str


class Choice(BaseModel):
    """An object of a few values and no others, so that a small model ends it."""

    model_config = ConfigDict(extra="forbid")

    table: Literal["orders", "users"]
    size: Literal["small", "large"]


def server() -> Server:
    return Server(*sys.argv[1:4])


def report(package: str, **calls: Any) -> None:
    """`calls`: what each call has given."""
    print(json.dumps({"version": version(package), "calls": calls}))
