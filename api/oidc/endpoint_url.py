"""The URLs of an identity provider: HTTPS, or HTTP on this machine."""

from __future__ import annotations

from urllib.parse import urlsplit

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


def is_endpoint_url(text: object) -> bool:
    """Whether this is an absolute HTTPS URL, or an HTTP URL of this machine, without a user."""
    if not isinstance(text, str) or not text.isascii() or not text.isprintable() or " " in text:
        return False
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018  # raises ValueError for one that is no number
    except ValueError:
        return False
    if not parts.hostname or "@" in parts.netloc or parts.fragment:
        return False
    is_local = parts.scheme == "http" and parts.hostname in LOOPBACK_HOSTS
    return parts.scheme == "https" or is_local
