"""Undoes what fused bases leave in transformers' modules, for the tests after them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from loraplex.engine.model.fused_rotary import ROTARY_NAME, ServedRotary


@contextmanager
def own_rotary_afterwards() -> Iterator[None]:
    """Families whose rotary embedding is replaced meanwhile get their own back."""
    try:
        yield
    finally:
        restore_rotary()


def restore_rotary() -> None:
    """Give every family its own rotary embedding back."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models."):
            served = vars(module).get(ROTARY_NAME)
            if isinstance(served, ServedRotary):
                setattr(module, ROTARY_NAME, served.own)
