"""Signs events as the Standard Webhooks specification says, with secrets kept encrypted.

https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Sequence
from datetime import datetime

from ..keyring import secret_id
from ..sealing import Seal
from ..secrets import WEBHOOK_SECRET_KEY
from .models import WebhookEndpoint

SECRET_PREFIX = "whsec_"
SECRET_BYTES = 32


class SigningSecrets:
    """The secrets of endpoints, encrypted under the server's present secret."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        """`secrets`: the server's, the present one first; with the others data is decrypted."""
        self._seal = Seal(secrets, WEBHOOK_SECRET_KEY)
        self.current_id = secret_id(secrets[0])
        """The id of the server's present secret."""

    def renew(self, endpoint: WebhookEndpoint, previous_until: datetime | None) -> str:
        """Give the endpoint a new secret; returns its text, which is not kept.

        The one that it has also signs until `previous_until`; None: no longer.
        """
        self.reseal(endpoint)
        endpoint.previous_secret = endpoint.secret if previous_until else None
        endpoint.previous_until = previous_until
        key = os.urandom(SECRET_BYTES)
        endpoint.secret = self._seal.close(key, endpoint.id.encode())
        endpoint.secret_id = self.current_id
        return SECRET_PREFIX + base64.b64encode(key).decode()

    def reseal(self, endpoint: WebhookEndpoint) -> None:
        """Encrypt under the present secret what another one encrypted, if that one is there."""
        if endpoint.secret is None or endpoint.secret_id == self.current_id:
            return
        keys = [self._open(endpoint, sealed) for sealed in _sealed(endpoint)]
        if None in keys:
            return
        context = endpoint.id.encode()
        endpoint.secret, *previous = (self._seal.close(key, context) for key in keys if key)
        endpoint.previous_secret = previous[0] if previous else None
        endpoint.secret_id = self.current_id

    def sign(
        self, endpoint: WebhookEndpoint, event_id: str, body: bytes, now: datetime
    ) -> dict[str, str] | None:
        """The headers that prove where the event comes from; None if the server no longer has the
        secret under which the endpoint's is encrypted."""
        timestamp = int(now.timestamp())
        is_rotating = endpoint.previous_until is not None and now < endpoint.previous_until
        keys = [self._open(endpoint, sealed) for sealed in _sealed(endpoint)[: 1 + is_rotating]]
        message = f"{event_id}.{timestamp}.".encode() + body
        signatures = [_signature(key, message) for key in keys if key is not None]
        if not signatures:
            return None
        return {
            "webhook-id": event_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": " ".join(signatures),
        }

    def _open(self, endpoint: WebhookEndpoint, sealed: bytes) -> bytes | None:
        return self._seal.open(sealed, endpoint.id.encode())


def _sealed(endpoint: WebhookEndpoint) -> list[bytes]:
    """The present secret, and the previous one if there is one."""
    return [endpoint.secret, *filter(None, [endpoint.previous_secret])]


def _signature(key: bytes, message: bytes) -> str:
    return "v1," + base64.b64encode(hmac.digest(key, message, hashlib.sha256)).decode()
