"""Verification of ID tokens (OpenID Connect Core 1.0, section 3.1.3.7)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from joserfc import jws, jwt
from joserfc.errors import JoseError, SecurityWarning
from joserfc.jwk import ECKey, OKPKey, RSAKey

from ...platform.errors import SignInRejected
from ...platform.identities.models import MAX_SUBJECT_LENGTH

ALGORITHMS = ("RS256", "PS256", "ES256", "EdDSA")
"""All are signatures: with a secret key, or with none, whoever knows the public keys could sign."""
LEEWAY_SECONDS = 60
"""The clocks of the provider and of this server may differ by this."""
MAX_TOKEN_LENGTH = 64 << 10

# Headers of a provider's own are ignored, as RFC 7515 says, but for critical ones.
_REGISTRY = jws.JWSRegistry(algorithms=ALGORITHMS, strict_check_header=False)

SigningKey = RSAKey | ECKey | OKPKey
Claims = Mapping[str, Any]


class Expected(NamedTuple):
    """What the token of a sign-in must say."""

    issuer: str
    client_id: str
    nonce: str


def key_id_of(token: str) -> str | None:
    """The key that the token names. Raises SignInRejected if the token is malformed or uses an
    algorithm that is not allowed."""
    if len(token) > MAX_TOKEN_LENGTH:
        raise SignInRejected("the ID token is too long")
    try:
        header = jws.extract_compact(token.encode()).headers()
    except (JoseError, ValueError) as exc:
        raise SignInRejected("the ID token is malformed") from exc
    if header.get("alg") not in ALGORITHMS:
        raise SignInRejected("the algorithm of the ID token is not allowed")
    kid = header.get("kid")
    if kid is not None and not isinstance(kid, str):
        raise SignInRejected("the ID token is malformed")
    return kid


def read_id_token(
    token: str, key: SigningKey, expected: Expected, access_token: str | None, now: float
) -> Claims:
    """The claims of the token, verified with this key.

    `access_token`: was sent beside it. `now`: seconds since 1970. Raises SignInRejected.
    """
    try:
        with warnings.catch_warnings():
            # RFC 9864 renames EdDSA, and providers use the old name.
            warnings.simplefilter("ignore", SecurityWarning)
            decoded = jwt.decode(token, key, registry=_REGISTRY)
    except (JoseError, ValueError, TypeError) as exc:
        raise SignInRejected("the signature of the ID token is wrong") from exc
    claims = decoded.claims
    _check_parties(claims, expected)
    _check_times(claims, now)
    if not _is_same(claims.get("nonce"), expected.nonce):
        raise SignInRejected("the ID token has another nonce")
    if "at_hash" in claims and not _is_same(
        claims["at_hash"], _half_hash(access_token or "", decoded.header["alg"])
    ):
        raise SignInRejected("the ID token is for another access token")
    return claims


def _check_parties(claims: Claims, expected: Expected) -> None:
    if claims.get("iss") != expected.issuer:
        raise SignInRejected("the ID token has another issuer")
    audience = claims.get("aud")
    audiences = audience if isinstance(audience, list) else [audience]
    if expected.client_id not in audiences:
        raise SignInRejected("the ID token is for another client")
    is_party_needed = len(audiences) > 1 or "azp" in claims
    if is_party_needed and claims.get("azp") != expected.client_id:
        raise SignInRejected("the ID token was issued to another client")
    subject = claims.get("sub")
    if not isinstance(subject, str) or not _is_subject(subject):
        raise SignInRejected("the ID token has no valid subject")


def _is_subject(text: str) -> bool:
    return 0 < len(text) <= MAX_SUBJECT_LENGTH and text.isascii() and text.isprintable()


def _check_times(claims: Claims, now: float) -> None:
    times = {name: claims[name] for name in ("exp", "iat", "nbf") if name in claims}
    are_numbers = all(type(moment) in (int, float) for moment in times.values())
    if not are_numbers or not {"exp", "iat"} <= times.keys():
        raise SignInRejected("the ID token has no time")
    if not now < times["exp"] + LEEWAY_SECONDS:
        raise SignInRejected("the ID token has expired")
    if not max(times["iat"], times.get("nbf", 0)) <= now + LEEWAY_SECONDS:
        raise SignInRejected("the ID token is not valid yet")


def _half_hash(text: str, algorithm: str) -> str:
    """`at_hash`: the left half of the hash that the signature uses."""
    digest = (hashlib.sha512 if algorithm == "EdDSA" else hashlib.sha256)(text.encode()).digest()
    return base64.urlsafe_b64encode(digest[: len(digest) // 2]).rstrip(b"=").decode()


def _is_same(sent: object, expected: str) -> bool:
    return isinstance(sent, str) and hmac.compare_digest(sent.encode(), expected.encode())
