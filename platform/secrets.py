"""The server's secret, and the keys derived from it: one per purpose, by label.

Two purposes never share a key, so a key that leaks or signs for one purpose is useless for another.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ..adapters.durable import sync_directory
from .errors import InsecureSecretFile

SECRET_BYTES = 32
API_KEY_PEPPER = "api-key-pepper"
AUDIT_CHAIN_KEY = "audit-chain-key"
IDEMPOTENCY_KEY = "idempotency-key"
WEBHOOK_SECRET_KEY = "webhook-secret-key"
SAMPLE_KEY = "sample-key"
PREFIX_DISK_KEY = "prefix-disk-key"


def derive_key(secret: bytes, label: str) -> bytes:
    """32 bytes for the purpose that `label` names (HKDF with SHA-256, RFC 5869, no salt)."""
    info = b"loraplex v1 " + label.encode()
    return HKDF(SHA256(), SECRET_BYTES, salt=None, info=info).derive(secret)


def load_or_create_secret(path: Path) -> bytes:
    """The secret in this file; created with mode 0600 if it does not exist.

    Concurrent processes get the same secret. Raises InsecureSecretFile if others may read the file,
    or if it does not hold 64 hexadecimal digits.
    """
    if not path.exists():
        _create(path)
    return parse_secret(_read(path), source=str(path))


def load_secrets(path: Path) -> list[bytes]:
    """The secrets in this file, one a line; none if it is not there. Raises as above."""
    return parse_secrets(_read(path), source=str(path)) if path.exists() else []


def load_text(path: Path) -> str | None:
    """A secret of another party in this file, without white space around it; None if there is no
    such file, or nothing in it. Raises InsecureSecretFile if others may read the file."""
    return (_read(path).strip() or None) if path.exists() else None


def parse_secret(text: str, *, source: str) -> bytes:
    """The secret written as 64 hexadecimal digits. Raises InsecureSecretFile, naming `source`."""
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise InsecureSecretFile(
            f"{source} does not contain {2 * SECRET_BYTES} hexadecimal digits."
        )
    return secret


def parse_secrets(text: str, *, source: str) -> list[bytes]:
    """Secrets between white space. Raises as `parse_secret`."""
    return [parse_secret(word, source=source) for word in text.split()]


def _read(path: Path) -> str:
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise InsecureSecretFile(f"{path} is readable by other users: run `chmod 600` on it.")
    return path.read_text()


def _create(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _link_unless_exists(temporary, path)
    finally:
        os.unlink(temporary)
    sync_directory(path.parent)  # if the name were lost, another secret would be made


def _link_unless_exists(source: str, path: Path) -> None:
    # A link appears whole and never replaces: the first of several makers wins.
    try:
        os.link(source, path)
    except FileExistsError:
        return
