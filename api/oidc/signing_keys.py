"""The provider's keys, fetched again when a token names an unknown one."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from joserfc.errors import JoseError, SecurityWarning
from joserfc.jwk import ECKey, OKPKey, RSAKey

from ...platform.errors import SignInRejected
from .id_token import SigningKey

MIN_REFRESH_SECONDS = 30.0
"""Tokens of unknown keys cause at most one request in this time."""
MAX_AGE_SECONDS = 3600.0
"""A key that the provider has withdrawn is refused after this time."""
MIN_RSA_BITS = 2048
_TYPES: Mapping[str, type[SigningKey]] = {"RSA": RSAKey, "EC": ECKey, "OKP": OKPKey}


class SigningKeys:
    """One per server."""

    def __init__(
        self,
        fetch: Callable[[], Awaitable[Mapping[str, Any]]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fetch`: the provider's JWK Set (RFC 7517); it may raise ApiError."""
        self._fetch = fetch
        self._clock = clock
        self._keys: dict[str | None, SigningKey] = {}
        self._fetched_at = -MAX_AGE_SECONDS
        self._fetching = asyncio.Lock()

    async def find(self, key_id: str | None) -> SigningKey:
        """The key of this id; without an id, the provider's only key. Raises SignInRejected or
        ApiError."""
        async with self._fetching:
            if self._must_fetch(key_id):
                self._keys = dict(_read(await self._fetch()))
                self._fetched_at = self._clock()
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        key = self._keys.get(key_id)
        if key is None:
            raise SignInRejected("the key of the ID token is unknown")
        return key

    def _must_fetch(self, key_id: str | None) -> bool:
        is_unknown = not self._keys if key_id is None else key_id not in self._keys
        age = self._clock() - self._fetched_at
        return age >= (MIN_REFRESH_SECONDS if is_unknown else MAX_AGE_SECONDS)


def _read(content: Mapping[str, Any]) -> Iterator[tuple[str | None, SigningKey]]:
    """The keys for signatures of the types that are accepted; others are skipped."""
    keys = content.get("keys")
    for key in keys if isinstance(keys, list) else []:
        if not isinstance(key, dict) or key.get("use", "sig") != "sig":
            continue
        kind = _TYPES.get(str(key.get("kty")))
        if kind is None:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SecurityWarning)  # weak keys are skipped below
                parsed = kind.import_key(key)
        except (JoseError, ValueError, TypeError):
            continue
        if not _is_weak(parsed):
            yield parsed.kid, parsed


def _is_weak(key: SigningKey) -> bool:
    return isinstance(key, RSAKey) and key.public_key.key_size < MIN_RSA_BITS
