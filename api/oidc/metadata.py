"""What an identity provider publishes about itself (OpenID Connect Discovery 1.0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .bounded_client import unavailable
from .endpoint_url import is_endpoint_url

WELL_KNOWN = "/.well-known/openid-configuration"


@dataclass(frozen=True, slots=True)
class Metadata:
    """The endpoints of a provider."""

    authorization_endpoint: str
    token_endpoint: str
    keys_url: str
    sign_out_url: str | None
    """Where browsers end their session at the provider, if it publishes this."""
    takes_basic_auth: bool
    """The client's secret is sent as HTTP Basic, and otherwise in the form."""


def metadata_url(issuer: str) -> str:
    """Where the issuer publishes its metadata."""
    return issuer.rstrip("/") + WELL_KNOWN


def read_metadata(content: Mapping[str, Any], issuer: str) -> Metadata:
    """The metadata of this issuer. Raises ApiError (`identity_provider_unavailable`)."""
    if content.get("issuer") != issuer:
        raise unavailable("its metadata names another issuer")
    endpoints = [
        content.get(name) for name in ("authorization_endpoint", "token_endpoint", "jwks_uri")
    ]
    sign_out = content.get("end_session_endpoint")
    if not all(map(is_endpoint_url, [*endpoints, *([] if sign_out is None else [sign_out])])):
        raise unavailable("its metadata has an invalid URL")
    methods = content.get("token_endpoint_auth_methods_supported")
    takes_basic = not isinstance(methods, list) or "client_secret_basic" in methods
    authorization, token, keys = map(str, endpoints)
    return Metadata(authorization, token, keys, sign_out, takes_basic)
