"""Certificates of a fleet, and of those who do not belong to it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

from loraplex.api.fleet.certificate_authority import PURPOSES, CertificateAuthority, Signed
from loraplex.engine.fleet.certificates import Certificates

DAY = timedelta(days=1)


class Authority:
    """Signs certificates and writes them to a folder of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._numbers = count(1)
        now = datetime.now(UTC)
        self._signer = CertificateAuthority(folder.name, begins_at=now - 9 * DAY, ends_at=now + DAY)
        self._path = folder / "authority.pem"
        self._path.write_bytes(self._signer.signed.certificate)

    def issue(self, name: str, *, ends_in: timedelta = DAY, purpose: str = "") -> Certificates:
        """The certificate of an agent or an API server, with this DNS name.

        `purpose` is the name whose use of a key it allows, if it is another one.
        """
        now = datetime.now(UTC)
        signed = self._signer.issue(
            name,
            begins_at=now - 8 * DAY,
            ends_at=now + ends_in,
            purpose=PURPOSES[purpose or name],
        )
        return self._write(signed)

    def _write(self, signed: Signed) -> Certificates:
        stem = self._folder / str(next(self._numbers))
        paths = Certificates(self._path, stem.with_suffix(".pem"), stem.with_suffix(".key"))
        paths.certificate.write_bytes(signed.certificate)
        paths.key.write_bytes(signed.key)
        return paths
