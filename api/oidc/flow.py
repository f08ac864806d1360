"""One sign-in flow: from the console to the identity provider and back.

The flow is a token in a cookie of the browser. `state`, `nonce` and the PKCE verifier are derived
from it, so the server stores nothing until the browser comes back, and a `state` fits one browser.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass, field

from ...platform.secrets import derive_key

PREFIX = "lpx_flow_"
LIFETIME_SECONDS = 600
_RANDOM_BYTES = 32
_MAX_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Flow:
    """A flow that this installation began. The text is a secret and does not appear in the repr."""

    text: str = field(repr=False)
    expires_at: int
    """Seconds since 1970."""

    @property
    def state(self) -> str:
        return self._derive("state")

    @property
    def nonce(self) -> str:
        return self._derive("nonce")

    @property
    def verifier(self) -> str:
        """PKCE's `code_verifier` (RFC 7636): 64 characters."""
        return self._derive("verifier")

    @property
    def challenge(self) -> str:
        """Its `code_challenge` by the method S256."""
        digest = hashlib.sha256(self.verifier.encode()).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    @property
    def hash(self) -> str:
        """Names the flow once it is spent."""
        return self._derive("hash")

    def _derive(self, label: str) -> str:
        return derive_key(self.text.encode(), f"oidc-flow-{label}").hex()


class Flows:
    """Begins flows, and recognizes them. One per server; all servers have the same secret."""

    def __init__(self, secret: bytes) -> None:
        self._key = derive_key(secret, "oidc-flows")

    def begin(self) -> Flow:
        """A new flow."""
        expires_at = int(time.time()) + LIFETIME_SECONDS
        content = f"{PREFIX}{expires_at}.{secrets.token_urlsafe(_RANDOM_BYTES)}"
        return Flow(f"{content}.{self._sign(content)}", expires_at)

    def parse(self, text: str) -> Flow | None:
        """The flow of this cookie; None if this installation did not begin it, or it has
        expired."""
        content, _, signature = text.rpartition(".")
        if len(text) > _MAX_LENGTH or not text.isascii():
            return None
        if not hmac.compare_digest(signature, self._sign(content)):
            return None
        expires_at = int(content.removeprefix(PREFIX).partition(".")[0])
        return Flow(text, expires_at) if time.time() < expires_at else None

    def _sign(self, content: str) -> str:
        return hmac.new(self._key, content.encode(), hashlib.sha256).hexdigest()
