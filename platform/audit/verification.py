"""Verifies a chain of the audit log."""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from ..keyring import Keyring
from .models import HASH_LENGTH
from .repository import ChainEnd


class Breach(NamedTuple):
    """The first place at which a chain does not verify."""

    number: int
    """The number of the entry."""
    reason: str


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of verifying a chain."""

    chain: str
    """A tenant's id, or `platform`."""
    last_number: int
    """Up to this entry everything is in order."""
    is_finished: bool
    """False: more entries follow, which were not verified."""
    breach: Breach | None = None


class ChainedEntry(Protocol):
    """The signed fields of an entry: a row of either table, or its columns."""

    @property
    def number(self) -> Any: ...
    @property
    def at(self) -> Any: ...
    @property
    def actor_kind(self) -> Any: ...
    @property
    def actor_id(self) -> Any: ...
    @property
    def actor_name(self) -> Any: ...
    @property
    def action(self) -> Any: ...
    @property
    def resource(self) -> Any: ...
    @property
    def details(self) -> Any: ...
    @property
    def request_id(self) -> Any: ...
    @property
    def address(self) -> Any: ...
    @property
    def previous_hash(self) -> Any: ...


def signed_text(chain: str, entry: ChainedEntry) -> bytes:
    """The bytes that the entry's hash covers."""
    at: datetime = entry.at
    fields = [
        chain,
        entry.number,
        at.isoformat(),
        str(entry.actor_kind),
        entry.actor_id,
        entry.actor_name,
        entry.action,
        entry.resource,
        entry.details,
        entry.request_id,
        entry.address,
        entry.previous_hash.hex(),
    ]
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


class ChainWalk:
    """Verifies a chain entry by entry, each of which must follow the one before."""

    def __init__(self, keys: Keyring, chain: str, *, after: int) -> None:
        """Begins after the number `after`, whose own entry is verified once more."""
        self.chain = chain
        self.begin = max(after, 1)
        """The first entry to give to `step`."""
        self.number = self.begin - 1
        """Up to here everything is in order."""
        self._keys = keys
        self._hash: bytes | None = None if after else bytes(HASH_LENGTH)
        self._age: int | None = None

    def step(self, entry: Any) -> Breach | None:
        """Verify the next entry."""
        number = self.number + 1
        if entry.number != number:
            return Breach(number, "The entry is missing.")
        if self._hash is not None and entry.previous_hash != self._hash:
            return Breach(number, "The entry does not follow on the one before.")
        expected = self._keys.mac(signed_text(self.chain, entry), entry.secret_id)
        if expected is None:
            return Breach(number, "The server has no secret of the entry's id.")
        if not hmac.compare_digest(expected, entry.hash):
            return Breach(number, "The entry was changed.")
        age = self._keys.age(entry.secret_id)
        if self._age is not None and age is not None and age > self._age:
            # A secret that was replaced must not sign new entries.
            return Breach(number, "The entry is signed with an older secret than the one before.")
        self.number, self._hash, self._age = number, entry.hash, age
        return None

    def check_reached(self, number: int) -> Breach | None:
        """Whether the entries reached this number."""
        is_reached = self.number >= number
        return None if is_reached else Breach(self.number + 1, "The entry is missing.")

    def compare(self, end: ChainEnd) -> Breach | None:
        """Whether the head, which records the end of the chain, matches the entries."""
        if end.head_number is None:
            return Breach(1, "The head is missing.") if self.number else None
        if end.head_number > self.number:
            return Breach(self.number + 1, "The end of the chain is cut off.")
        if end.head_number < self.number:
            return Breach(end.head_number + 1, "The entry is behind the end of the chain.")
        is_same = self._hash is None or self._hash == end.head_hash
        return None if is_same else Breach(self.number, "The head names another entry.")
