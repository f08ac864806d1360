"""The authority of a fleet: signs the certificates of `engine/fleet/certificates.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ...engine.fleet.certificates import AGENT_NAME, API_NAME, agent_certificates, api_certificates

PURPOSES: Mapping[str, x509.ObjectIdentifier] = {
    AGENT_NAME: ExtendedKeyUsageOID.SERVER_AUTH,
    API_NAME: ExtendedKeyUsageOID.CLIENT_AUTH,
}
AUTHORITY_NAME = "Loraplex fleet"
AUTHORITY_KEY = "authority.key"
SLOW_CLOCK = timedelta(hours=1)
"""A machine whose clock is behind by less accepts new certificates."""


class Signed(NamedTuple):
    """A certificate and its private key, both as PEM."""

    certificate: bytes
    key: bytes


class CertificateAuthority:
    """A key on P-256 and its own certificate, and what it signs."""

    def __init__(self, name: str, *, begins_at: datetime, ends_at: datetime) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        # Two authorities have the same name while one replaces the other: their keys differ.
        self._key_id = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = self._describe(self._name, self._key, begins_at, ends_at)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        ).add_extension(self._key_id, critical=False)
        self.signed = self._sign(builder, self._key)
        """Its own."""

    def issue(
        self,
        name: str,
        *,
        begins_at: datetime,
        ends_at: datetime,
        purpose: x509.ObjectIdentifier | None = None,
    ) -> Signed:
        """A certificate with this DNS name. `purpose` is the use of its key; None: the name's."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([purpose or PURPOSES[name]])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._key_id)
        builder = (
            self._describe(x509.Name([]), key, begins_at, ends_at)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=True)
            .add_extension(usage, critical=False)
            .add_extension(issuer, critical=False)
        )
        return self._sign(builder, key)

    def _describe(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        begins_at: datetime,
        ends_at: datetime,
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins_at)
            .not_valid_after(ends_at)
        )

    def _sign(self, builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> Signed:
        certificate = builder.sign(self._key, hashes.SHA256())
        text = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return Signed(certificate.public_bytes(serialization.Encoding.PEM), text)


def write_certificates(folder: Path, *, days: int) -> datetime:
    """Write the files of a new authority, of agents and of API servers; returns when all of them
    end. Only the owner can read the keys. Raises FileExistsError before anything is written."""
    agent, api = agent_certificates(folder), api_certificates(folder)
    begins_at = datetime.now(UTC) - SLOW_CLOCK
    ends_at = (begins_at + SLOW_CLOCK + timedelta(days=days)).replace(microsecond=0)
    authority = CertificateAuthority(AUTHORITY_NAME, begins_at=begins_at, ends_at=ends_at)
    own = authority.signed
    contents = {agent.authority: own.certificate, folder / AUTHORITY_KEY: own.key}
    for name, paths in ((AGENT_NAME, agent), (API_NAME, api)):
        signed = authority.issue(name, begins_at=begins_at, ends_at=ends_at)
        contents |= {paths.certificate: signed.certificate, paths.key: signed.key}
    present = [str(path) for path in contents if path.exists()]
    if present:
        raise FileExistsError(f"already there: {', '.join(present)}")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path, content in contents.items():
        _write(path, content, mode=0o600 if path.suffix == ".key" else 0o644)
    return ends_at


def _write(path: Path, content: bytes, *, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
