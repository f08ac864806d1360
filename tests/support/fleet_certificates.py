"""Certificates of a fleet, and of those who do not belong to it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from loraplex.engine.fleet.certificates import AGENT_NAME, API_NAME, Certificates

DAY = timedelta(days=1)
PURPOSES = {
    AGENT_NAME: ExtendedKeyUsageOID.SERVER_AUTH,
    API_NAME: ExtendedKeyUsageOID.CLIENT_AUTH,
}


class Authority:
    """Signs certificates and writes them to a folder of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name)])
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 9 * DAY)
            .not_valid_after(now + DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self._path = folder / "authority.pem"
        self._path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, ends_in: timedelta = DAY, purpose: str = "") -> Certificates:
        """The certificate of an agent or an API server, with this DNS name.

        `purpose` is the name whose use of a key it allows, if it is another one.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        usage = PURPOSES[purpose or name]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 8 * DAY)
            .not_valid_after(now + ends_in)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        stem = self._folder / f"{certificate.serial_number:x}"
        paths = Certificates(self._path, stem.with_suffix(".pem"), stem.with_suffix(".key"))
        paths.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return paths
