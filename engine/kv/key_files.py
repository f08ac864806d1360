"""The files of prefixes on disk: folders, the names of keys, and their erasure.

A file's name has hashes of the tenant and of the adapters that the prefixes were computed with, so
any process erases an adapter's prefixes by removing its keys, without the tier's key and whether an
engine runs or not. Torch-free.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from ...adapters.durable import sync_directory
from ...adapters.identity import AdapterKey
from .prefix_cache import CacheNamespace

FOLDER = "keys"
SUFFIX = ".key"
_FOLDER_PREFIX = "kv-"
FILE_BYTES = 60
"""Nonce, key and tag."""
_DIGITS = 16
_BASE = "base"


def key_name(namespace: CacheNamespace) -> str:
    """The name of the key of these prefixes."""
    parts = [_BASE] if namespace.adapter is None else map(_part, namespace.adapter.parts)
    return "-".join((_hash(namespace.tenant_id), *parts))


def open_folder(tier: Path, identity: str) -> Path:
    """The folder of an engine with this identity, and no other engine's. Raises OSError."""
    folder = tier / f"{_FOLDER_PREFIX}{identity}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_folders(tier, but=folder)
    return folder


def remove_folders(tier: Path, *, but: Path | None = None) -> None:
    """Remove what engines have written, after its keys were erased. Other files in the tier's
    folder stay. Raises OSError. `tier`: see `erase_keys_of`."""
    for folder in tier.glob(f"{_FOLDER_PREFIX}*"):
        if folder != but:
            _erase_in(folder / FOLDER, lambda _: True)
            shutil.rmtree(folder)


def erase_keys_of(tier: Path, adapter: AdapterKey) -> None:
    """Make all prefixes on disk unreadable that were computed with this adapter version, alone or
    in a composition. Raises OSError. `tier`: the tier's folder, which need not exist."""
    part = _part(adapter)
    _erase_where(tier, lambda name: part in name.split("-")[1:])


def keep_keys_of(tier: Path, tenant_ids: Iterable[str], adapters: Iterable[AdapterKey]) -> None:
    """Make all prefixes on disk unreadable but those of these tenants that were computed with the
    base or these adapter versions. Raises OSError. `tier`: see `erase_keys_of`."""
    kept = {_BASE, *map(_hash, tenant_ids), *map(_part, adapters)}
    _erase_where(tier, lambda name: not kept.issuperset(name.split("-")))


def _erase_where(tier: Path, is_doomed: Callable[[str], bool]) -> None:
    for folder in tier.glob(f"{_FOLDER_PREFIX}*/{FOLDER}"):
        _erase_in(folder, is_doomed)


def _erase_in(folder: Path, is_doomed: Callable[[str], bool]) -> None:
    doomed = [path for path in folder.glob(f"*{SUFFIX}") if is_doomed(path.stem)]
    if doomed:
        erase_files(folder, doomed)


def erase_files(folder: Path, paths: Iterable[Path]) -> None:
    """Overwrite and remove files, and wait until the disk has done so."""
    for path in paths:
        try:
            with path.open("r+b", buffering=0) as file:
                file.write(bytes(FILE_BYTES))
                os.fsync(file.fileno())
            path.unlink()
        except FileNotFoundError:
            continue
    sync_directory(folder)


def _part(adapter: AdapterKey) -> str:
    return _hash(f"{adapter.tenant_id}\0{adapter.digest}")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
