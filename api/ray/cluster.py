"""The connection to a Ray cluster, and what it has to be protected by.

Anyone who can reach a Ray cluster can run code on it. A cluster without token authentication, or
with a node at a public address, is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from typing import Any

import ray

NAMESPACE = "loraplex"
"""Of the actors' names."""
_HARMLESS_CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_PROBE_SECONDS = 10.0


class ClusterRefused(Exception):
    """The cluster cannot be reached or is not protected; the message says what to do."""


def connect(address: str) -> None:
    """Connect this process to a cluster: `host:port`, or `auto` for that of this machine.

    Raises ClusterRefused.
    """
    if address != "auto":
        # Ray itself would wait for a head that is not there.
        check_requires_token(address)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as exc:
        raise ClusterRefused(f"No connection to the Ray cluster at {address}: {exc}") from exc
    try:
        gcs_address: str = ray.get_runtime_context().gcs_address
        check_requires_token(gcs_address)
        alive = (node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
        check_addresses(alive)
    except ClusterRefused:
        ray.shutdown()
        raise


def check_requires_token(gcs_address: str) -> None:
    """Call the head without a token. Raises ClusterRefused unless it denies the call.

    The variables of this process say nothing about how the head was started.
    """
    code = _status_of_a_call_without_token(gcs_address)
    if code == "UNAUTHENTICATED":
        return
    if code == "OK":
        raise ClusterRefused(
            "The Ray cluster has no token authentication: anyone who can reach it can run code on "
            "it. Start every node with RAY_AUTH_MODE=token."
        )
    raise ClusterRefused(f"Whether the Ray cluster requires a token is not known: {code}.")


def check_addresses(addresses: Iterable[str]) -> None:
    """Raises ClusterRefused for a public address."""
    for address in addresses:
        ip = ip_address(address)
        if not (ip.is_private or ip.is_loopback or ip.is_link_local):
            raise ClusterRefused(
                f"The Ray node {address} has a public address. Ray needs a private network."
            )


def _status_of_a_call_without_token(gcs_address: str) -> str:
    import grpc  # comes with Ray

    with grpc.insecure_channel(gcs_address) as channel:
        call: Any = channel.unary_unary(_HARMLESS_CALL)
        try:
            call(b"", timeout=_PROBE_SECONDS)
        except grpc.RpcError as exc:
            return str(exc.code().name)
    return "OK"
