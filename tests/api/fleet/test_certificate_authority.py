"""The certificates that `loraplex fleet certificates` writes, judged by OpenSSL."""

from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from loraplex.api.fleet.certificate_authority import write_certificates
from loraplex.engine.fleet.certificates import (
    AGENT_NAME,
    API_NAME,
    Certificates,
    agent_certificates,
    agent_context,
    api_certificates,
    api_context,
    certifies,
)

FILES = ["agent.key", "agent.pem", "api.key", "api.pem", "authority.key", "authority.pem"]


def shaken_hands(agent: Certificates, api: Certificates) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """The two ends of a connection in memory, agent first. Raises ssl.SSLError."""
    to_agent, to_api = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = api_context(api)
    client.check_hostname = False
    ends = (
        agent_context(agent).wrap_bio(to_agent, to_api, server_side=True),
        client.wrap_bio(to_api, to_agent),
    )
    waiting = list(ends)
    for _ in range(10):
        waiting = [end for end in waiting if not has_shaken(end)]
    assert not waiting
    return ends


def has_shaken(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def test_an_agent_and_an_api_server_know_each_other_by_the_files(tmp_path: Path) -> None:
    write_certificates(tmp_path, days=1)
    agent, api = shaken_hands(agent_certificates(tmp_path), api_certificates(tmp_path))
    seen_by_agent, seen_by_api = agent.getpeercert(), api.getpeercert()
    assert seen_by_agent is not None
    assert seen_by_api is not None
    assert certifies(seen_by_agent, API_NAME)
    assert certifies(seen_by_api, AGENT_NAME)


def test_another_authority_is_not_trusted(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        write_certificates(tmp_path / name, days=1)
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken_hands(agent_certificates(tmp_path / "ours"), api_certificates(tmp_path / "theirs"))


def test_two_authorities_are_trusted_while_one_replaces_the_other(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        write_certificates(folder, days=1)
    both = b"".join((folder / "authority.pem").read_bytes() for folder in (old, new))
    for folder in (old, new):
        (folder / "authority.pem").write_bytes(both)
    shaken_hands(agent_certificates(new), api_certificates(old))
    shaken_hands(agent_certificates(old), api_certificates(new))


def test_certificates_end_after_the_days_and_accept_slow_clocks(tmp_path: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    ends_at = write_certificates(tmp_path, days=30)
    assert timedelta(days=30) <= ends_at - before <= timedelta(days=30, minutes=5)
    for path in tmp_path.glob("*.pem"):
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        assert certificate.not_valid_after_utc == ends_at
        assert certificate.not_valid_before_utc <= before - timedelta(minutes=55)
        key = certificate.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert isinstance(key.curve, ec.SECP256R1)


def test_only_the_owner_can_read_the_keys(tmp_path: Path) -> None:
    write_certificates(tmp_path, days=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    for path in tmp_path.glob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", FILES)
def test_no_file_is_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("ours")
    with pytest.raises(FileExistsError, match=name):
        write_certificates(tmp_path, days=1)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "ours"
