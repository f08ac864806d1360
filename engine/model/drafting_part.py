"""What a base computes when it drafts for itself."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class DraftingPart(Protocol):
    """Part of a model, or its cheaper form, with the same KV cache and adapters."""

    name: str
    """By which ranks know it."""

    def only(self) -> AbstractContextManager[None]:
        """The model's forwards inside compute this alone."""
