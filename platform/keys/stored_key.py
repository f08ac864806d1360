"""The columns that tenants' and operators' API keys share; never the key's text."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from sqlalchemy import JSON, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from ..base import UtcDateTime, utc_now
from ..errors import ApiKeyExpired, ApiKeyRevoked, InvalidTransition, InvalidValue
from ..keyring import SECRET_ID_LENGTH, Keyring
from ..networks import Network, parse_networks
from .token import KEY_ID_LENGTH, KeyToken

MAX_KEY_NAME_LENGTH = 200
LAST_USED_GRANULARITY = timedelta(hours=1)
_UNKNOWN_MAC = bytes(32)


class StoredKey:
    """A key's id and the keyed hash of its text. Revoked keys are kept, because other rows refer to
    them."""

    id: Mapped[str] = mapped_column(String(KEY_ID_LENGTH), primary_key=True)
    name: Mapped[str] = mapped_column(String(MAX_KEY_NAME_LENGTH))
    mac: Mapped[bytes] = mapped_column(LargeBinary(32))
    """HMAC-SHA256 of the key's whole text under the server's pepper."""
    secret_id: Mapped[str] = mapped_column(String(SECRET_ID_LENGTH))
    """Of the server's secret that the pepper comes from."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_used_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """With a resolution of an hour: see `LAST_USED_GRANULARITY`."""
    networks: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """The networks (CIDR) from which it may be used; None: any."""

    @property
    def allowed_networks(self) -> tuple[Network, ...] | None:
        """The same, to compare addresses with."""
        return None if self.networks is None else parse_networks(self.networks)

    def check_usable(self, now: datetime) -> None:
        """Raises ApiKeyRevoked or ApiKeyExpired."""
        if self.revoked_at is not None:
            raise ApiKeyRevoked
        if self.expires_at is not None and self.expires_at <= now:
            raise ApiKeyExpired

    def check_rotatable(self, now: datetime) -> None:
        """Raises InvalidTransition."""
        if self.revoked_at is not None:
            raise InvalidTransition("revoked", "rotated")
        if self.expires_at is not None and self.expires_at <= now:
            raise InvalidTransition("expired", "rotated")


def sign(key: StoredKey, token: KeyToken, peppers: Keyring) -> None:
    """Make this the key's text, under the present pepper."""
    key.mac, key.secret_id = peppers.sign(token.text.encode()), peppers.current_id


def is_text_of(key: StoredKey | None, token: KeyToken, peppers: Keyring) -> bool:
    """Whether the token is the key's text. Takes the same time if there is no such key."""
    text = token.text.encode()
    if key is None:
        peppers.is_signed(text, _UNKNOWN_MAC, peppers.current_id)
        return False
    return peppers.is_signed(text, key.mac, key.secret_id)


def is_use_to_be_noted(key: StoredKey, peppers: Keyring, now: datetime) -> bool:
    """Its last use is long ago, or it is still under an earlier pepper.

    Coarse, so that a busy key costs one write an hour instead of one a request.
    """
    is_long_ago = key.last_used_at is None or abs(now - key.last_used_at) >= LAST_USED_GRANULARITY
    return is_long_ago or key.secret_id != peppers.current_id


def note_use(key: StoredKey, token: KeyToken, peppers: Keyring, now: datetime) -> None:
    """Write down that the key was used, and sign it under the present pepper."""
    if key.secret_id != peppers.current_id:
        sign(key, token, peppers)
    if is_use_to_be_noted(key, peppers, now):
        key.last_used_at = now


def check_networks(texts: Iterable[str] | None) -> tuple[Network, ...] | None:
    """The networks; None for any. Raises InvalidValue."""
    networks = None if texts is None else parse_networks(texts)
    if networks == ():
        raise InvalidValue("A key restricted to networks must name at least one.", param="networks")
    return networks


def check_key_name(name: str) -> str:
    """The name. Raises InvalidValue."""
    if not 1 <= len(name) <= MAX_KEY_NAME_LENGTH:
        raise InvalidValue(
            f"A key's name must have 1 to {MAX_KEY_NAME_LENGTH} characters.", param="name"
        )
    return name
