"""Checks at start that a store is usable."""

from __future__ import annotations

import hashlib
import tempfile
import uuid
from pathlib import Path

from .base import OBJECT_PREFIX, ObjectStore

_CONTENT = b"loraplex store check\n"
_PREFIX = "check"


def check_usable(store: ObjectStore) -> None:
    """List, write and delete a small object.

    Raises StoreDenied if the store is set up wrongly, StoreUnavailable if it does not answer.
    """
    next(iter(store.list_keys(OBJECT_PREFIX)), None)
    key = f"{_PREFIX}/{uuid.uuid4().hex}"
    with tempfile.NamedTemporaryFile() as file:
        file.write(_CONTENT)
        file.flush()
        store.put_file(key, Path(file.name), sha256=hashlib.sha256(_CONTENT).hexdigest())
    store.delete(key)
