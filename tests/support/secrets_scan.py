"""Searches for data that must not be stored: keys, and prompts with a marker."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sqlalchemy import create_engine

from loraplex.api.settings import Settings
from loraplex.platform.models import Base

MARK = "EXTREMELY-PRIVATE"
"""In the prompts, the answers' forms and the credentials of tests that look for them afterwards."""
_KEY = re.compile(
    rb"lpx_(?:live|admin)_[0-9A-Za-z]{12}_[0-9A-Za-z]{32,}|lpx_(?:session|join)_[0-9A-Za-z_-]{43}"
    rb"|whsec_[0-9A-Za-z+/]{32,}"
)


def leaks(written: bytes, secrets: Iterable[str] = ()) -> list[str]:
    """What is in `written` of marks, keys, tokens and these secrets, in plain or hexadecimal."""
    found = [match.decode() for match in set(_KEY.findall(written))]
    lower = written.lower()
    for secret in (MARK, *secrets):
        plain = secret.lower().encode()
        if plain in lower or plain.hex().encode() in lower:
            found.append(secret)
    return found


def database_bytes(settings: Settings) -> bytes:
    """The embedded database's files, pages that are free again included, or PostgreSQL's rows."""
    if settings.is_database_embedded:
        files = sorted(settings.data_dir.glob("loraplex.db*"))
        return b"".join(path.read_bytes() for path in files)
    engine = create_engine(settings.database_url)
    with engine.connect() as connection:
        rows = [
            text
            for table in Base.metadata.sorted_tables
            for (text,) in connection.exec_driver_sql(f'SELECT t::text FROM "{table.name}" t')
        ]
    engine.dispose()
    return "\n".join(rows).encode()


def secret_of(key: str) -> str:
    """The part of an API key that only its holder knows, without the checksum behind it."""
    return key.rsplit("_", 1)[-1][:32]
