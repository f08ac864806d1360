"""Checkpoints of the audit log's chains, stored outside the database.

An attacker with write access to the database can restore an older state of a chain together with
its head. A checkpoint that the attacker cannot change detects this.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ...adapters.durable import write_whole
from ..errors import InvalidValue
from ..sessions import PlatformSession
from . import repository
from .verification import Breach, Verified


class Checkpoint:
    """A file of the last entry of each chain: its number and its hash."""

    def __init__(self, path: Path) -> None:
        """Begins empty if the file is not there. Raises InvalidValue if it is no checkpoint."""
        self._path = path
        self._ends: dict[str, tuple[int, str]] = {}
        if path.exists():
            try:
                kept = json.loads(path.read_text())
                self._ends = {chain: (int(end[0]), str(end[1])) for chain, end in kept.items()}
            except (ValueError, LookupError, TypeError, AttributeError) as exc:
                raise InvalidValue(f"{path} is no checkpoint.", param="checkpoint") from exc

    def check(self, session: PlatformSession, verified: Verified) -> Verified:
        """`verified`, or a violation if the chain no longer has the entry that it ended with
        before.

        Stores the chain's present end if there is no violation.
        """
        chain = verified.chain
        if verified.breach is not None:
            return verified
        number, digest = self._ends.get(chain, (0, ""))
        if number and _hash_of(session, chain, number) != digest:
            breach = Breach(number, "The entry is not the one that the checkpoint remembers.")
            return replace(verified, breach=breach)
        last = _hash_of(session, chain, verified.last_number)
        if last is not None:
            self._ends[chain] = (verified.last_number, last)
        return verified

    def save(self) -> None:
        """Put the present ends in the place of the former ones, durably. Raises OSError."""
        write_whole(self._path, (json.dumps(self._ends, indent=2, sort_keys=True) + "\n").encode())


def _hash_of(session: PlatformSession, chain: str, number: int) -> str | None:
    for entry in repository.read_chain(session, chain, first=number, last=number):
        return str(entry.hash.hex())
    return None
