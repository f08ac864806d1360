"""The services that work on the database: records, presence, upkeep, sign-in."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass

from ...platform.base import utc_now
from ...platform.idempotency.service import IdempotentAnswers
from ...platform.samples.sample_seal import SampleSeal
from ...platform.servers.service import ServerInfo
from ...platform.version import __version__
from ..adapters.device_usage import DeviceUsageMeter
from ..control_plane.jobs import Jobs
from ..control_plane.presence import Presence
from ..control_plane.refusals import Refusals
from ..control_plane.sign_in import SignIn
from ..oidc.bounded_client import BoundedClient
from ..oidc.provider import Provider
from ..oidc.provider_sign_in import ProviderSignIn
from ..telemetry.metrics import Metrics
from ..telemetry.request_log import RequestLog
from ..upkeep.expiring_keys import ExpiringKeys
from ..upkeep.garbage import Garbage
from ..upkeep.shared_upkeep import SharedUpkeep
from ..webhooks.deliveries import Deliveries
from ..webhooks.egress_client import EgressClient
from .planes import Planes


@dataclass(frozen=True, slots=True)
class ControlServices:
    presence: Presence
    device_usage: DeviceUsageMeter
    expiring_keys: ExpiringKeys
    idempotent_answers: IdempotentAnswers
    jobs: Jobs
    sign_in: SignIn
    provider_sign_in: ProviderSignIn | None
    request_log: RequestLog
    refusals: Refusals
    webhooks: Deliveries | None
    """None: the operator allows no webhooks."""


def open_control(
    planes: Planes, metrics: Metrics, garbage: Garbage, stack: AsyncExitStack
) -> ControlServices:
    """Create the services without starting them; `stack` closes them."""
    control_plane, secrets = planes.control_plane, planes.settings.load_secrets()
    presence = Presence(_describe_server(planes), control_plane)
    stack.push_async_callback(presence.close)
    device_usage = DeviceUsageMeter(
        lambda: planes.engine.stats, control_plane, is_ours=planes.counts_devices
    )
    stack.push_async_callback(device_usage.close)
    expiring_keys = ExpiringKeys(control_plane=control_plane, metrics=metrics)
    stack.push_async_callback(expiring_keys.close)
    jobs = _open_jobs(planes, garbage, SampleSeal(secrets))
    stack.push_async_callback(jobs.close)
    sign_in = SignIn(control_plane, secrets[0])
    stack.push_async_callback(sign_in.aclose)
    request_log = RequestLog(control_plane, metrics)
    stack.push_async_callback(request_log.close)
    refusals = Refusals(control_plane)
    stack.push_async_callback(refusals.close)
    return ControlServices(
        presence=presence,
        device_usage=device_usage,
        expiring_keys=expiring_keys,
        idempotent_answers=IdempotentAnswers(secrets, planes.server_id),
        jobs=jobs,
        sign_in=sign_in,
        provider_sign_in=_open_provider_sign_in(planes, secrets[0], stack),
        request_log=request_log,
        refusals=refusals,
        webhooks=_open_webhooks(planes, metrics, stack),
    )


def _open_provider_sign_in(
    planes: Planes, secret: bytes, stack: AsyncExitStack
) -> ProviderSignIn | None:
    config = planes.settings.load_identity_provider()
    if config is None:
        return None
    client = BoundedClient()
    stack.push_async_callback(client.aclose)
    return ProviderSignIn(planes.control_plane, secret, Provider(config, client))


def _describe_server(planes: Planes) -> ServerInfo:
    return ServerInfo(
        id=planes.server_id,
        name=socket.gethostname(),
        version=__version__,
        base_id=planes.engine.info.base_id,
        started_at=utc_now(),
    )


def _open_webhooks(planes: Planes, metrics: Metrics, stack: AsyncExitStack) -> Deliveries | None:
    policy = planes.settings.webhook_policy
    if not policy.hosts:
        return None
    deliveries = Deliveries(
        control_plane=planes.control_plane,
        server_id=planes.server_id,
        egress=EgressClient(policy, environment=planes.settings.egress_environment),
        metrics=metrics,
    )
    stack.push_async_callback(deliveries.close)
    return deliveries


def _open_jobs(planes: Planes, garbage: Garbage, seal: SampleSeal) -> Jobs:
    upkeep = SharedUpkeep(
        planes.control_plane,
        garbage,
        request_log_days=planes.settings.request_log_days,
        upload_days=planes.settings.upload_days,
        sample_days=planes.settings.sample_days,
        seal=seal,
    )
    return Jobs(planes.leases, upkeep.jobs())
