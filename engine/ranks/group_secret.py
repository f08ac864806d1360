"""The secret of a group of ranks: who knows it may join. Torch-free."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from ..errors import InvalidParameter
from .rank_process import SECRET_BYTES

MIN_CHARACTERS = 32


def random_secret() -> bytes:
    """For a group whose ranks one process starts."""
    return secrets.token_bytes(SECRET_BYTES)


def secret_of_file(path: str | Path) -> bytes:
    """For a group over several hosts. Raises InvalidParameter if the file cannot be used."""
    try:
        written = Path(path).read_bytes().strip()
    except OSError as exc:
        raise InvalidParameter("rank_secret", f"{path} cannot be read: {exc.strerror}") from exc
    if len(written) < MIN_CHARACTERS:
        raise InvalidParameter("rank_secret", f"{path} has less than {MIN_CHARACTERS} characters")
    return hashlib.sha256(written).digest()
