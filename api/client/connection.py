"""The server and key of a client: given, from the environment, or from a profile.

A profile that is named takes precedence over the environment. A profile's key is sent only to its
own URL, whatever else is set.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .errors import InvalidArgument, KeyUnusable
from .profiles import DEFAULT_PROFILE, Profile, check_profile_name, load_profiles

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Connection:
    """What a client needs."""

    url: str
    key: str = field(repr=False)
    tenant: str | None
    """On which an operator acts."""


def find_connection(
    *,
    url: str | None = None,
    key: str | None = None,
    tenant: str | None = None,
    profile: str | None = None,
) -> Connection:
    """The connection to use; what is None is looked up.

    Raises KeyUnusable if there is no key for it, and InvalidArgument for a profile that is not
    there or cannot be read.
    """
    found_url = find_url(url, profile)
    found_key = key or _environment("LORAPLEX_API_KEY", profile)
    saved = _find_profile(profile)
    if found_key is None and saved is not None and plain_url(saved.url) == found_url:
        found_key = saved.key
    if found_key is None:
        raise KeyUnusable(
            f"No API key for {found_url}: run `loraplex login`, or set LORAPLEX_API_KEY."
        )
    return Connection(found_url, found_key, find_tenant(tenant, profile))


def find_url(url: str | None, profile: str | None) -> str:
    """The URL to use, without a path."""
    saved = _find_profile(profile)
    known = DEFAULT_URL if saved is None else saved.url
    return plain_url(url or _environment("LORAPLEX_URL", profile) or known)


def find_tenant(tenant: str | None, profile: str | None) -> str | None:
    """The tenant that an operator is to act on."""
    saved = _find_profile(profile)
    known = None if saved is None else saved.tenant
    return tenant or _environment("LORAPLEX_TENANT", profile) or known


def profile_name(profile: str | None) -> str:
    """The name of the profile to use, whether or not it exists. Raises InvalidArgument."""
    return check_profile_name(profile or os.environ.get("LORAPLEX_PROFILE") or DEFAULT_PROFILE)


def plain_url(url: str) -> str:
    """The URL without a slash or `/v1` at its end."""
    return url.strip().rstrip("/").removesuffix("/v1")


def _find_profile(profile: str | None) -> Profile | None:
    name = profile_name(profile)
    saved = load_profiles().get(name)
    if saved is None and (profile or os.environ.get("LORAPLEX_PROFILE")):
        raise InvalidArgument(
            f"Profile not found: {name}. Create it with `loraplex login --profile {name}`."
        )
    return saved


def _environment(name: str, profile: str | None) -> str | None:
    if profile:
        return None
    return os.environ.get(name, "").strip() or None
