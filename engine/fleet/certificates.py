"""How machines know each other: TLS 1.3, both ends with certificates of the fleet's own authority.

A certificate names the part that its holder plays, not its address, which changes when a process is
placed on another machine. So a stolen certificate of an agent opens no connection to another agent.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

AGENT_NAME = "agent.loraplex"
"""The DNS name in the certificates of agents, which listen."""
API_NAME = "api.loraplex"
"""The DNS name in the certificates of API servers, which connect."""


class Certificates(NamedTuple):
    """The PEM files of one end."""

    authority: Path
    """The certificate of the authority that signs those of the fleet, and of nobody else."""
    certificate: Path
    key: Path


def agent_certificates(folder: Path) -> Certificates:
    """The files of an agent in a folder that `loraplex fleet certificates` has written."""
    return Certificates(folder / "authority.pem", folder / "agent.pem", folder / "agent.key")


def api_certificates(folder: Path) -> Certificates:
    """Likewise those of an API server."""
    return Certificates(folder / "authority.pem", folder / "api.pem", folder / "api.key")


def agent_context(certificates: Certificates) -> ssl.SSLContext:
    """The TLS of an agent. Raises OSError if a file is missing or is no certificate or key."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, certificates)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # a resumed connection would not show its certificate again
    return context


def api_context(certificates: Certificates) -> ssl.SSLContext:
    """The TLS of an API server. Raises OSError if a file is missing or is no certificate or key."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, certificates)


def certifies(certificate: Mapping[str, Any], name: str) -> bool:
    """Whether a verified certificate, as `SSLSocket.getpeercert` returns it, has the DNS name."""
    return ("DNS", name) in certificate.get("subjectAltName", ())


def _context(protocol: int, certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(certificates.authority)
    context.load_cert_chain(certificates.certificate, certificates.key)
    return context
