"""The service that trains adapters."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec

from ...engine.tuning.environment import trainer_environment
from ...platform.errors import InvalidValue
from ..adapters.pushes import Pushes
from ..batches.tenant_files import TenantFiles
from ..ray.relay_command import RELAY_COMMAND, relay_arguments, relay_environment
from ..settings import Settings
from ..telemetry.metrics import Metrics
from ..telemetry.trainer_memories import TrainerMemories
from ..tuning.attempt import TrainerSetup
from ..tuning.checkpoint_store import CheckpointStore
from ..tuning.job_run import RunServices
from ..tuning.publication import Publication
from ..tuning.served_values import check_served_values
from ..tuning.trainer import TRAINER_COMMAND
from ..tuning.trainer_packages import missing_packages
from ..tuning.trainer_place import place_trainers
from ..tuning.tuning import Tuning
from ..tuning.work_folders import WorkFolders
from .planes import Planes
from .readiness import Readiness


async def open_tuning(
    planes: Planes,
    *,
    pushes: Pushes,
    files: TenantFiles,
    metrics: Metrics,
    memories: TrainerMemories,
    readiness: Readiness,
    stack: AsyncExitStack,
) -> Tuning | None:
    """Nothing of it runs yet; `stack` closes it. None: the operator has not turned it on.

    Raises InvalidValue without the packages, and for a base that is not that of the fleet.
    """
    if not planes.settings.tuning:
        return None
    _check_packages(planes.settings)
    info, has_own_engine = planes.engine.info, planes.membership is None
    if not has_own_engine:
        model = planes.bases.served
        await asyncio.to_thread(check_served_values, planes.engine_config, model, info)
    place = place_trainers(
        planes.settings, engine_device=info.device, has_own_engine=has_own_engine
    )
    services = RunServices(
        server_id=planes.server_id,
        control_plane=planes.control_plane,
        files=files,
        folders=WorkFolders(planes.settings.data_dir / "tuning"),
        checkpoints=CheckpointStore(
            planes.fetcher.store,
            control_plane=planes.control_plane,
            room=planes.disk_room,
            server_id=planes.server_id,
            runtime_id=info.runtime_id,
        ),
        publication=Publication(pushes, planes.control_plane),
        trainers=TrainerSetup(
            command=_command(planes),
            environment=_environment(planes.settings),
            model=planes.bases.served,
            config=planes.engine_config,
            engine=planes.engine,
            place=place,
            memories=memories,
        ),
        metrics=metrics,
    )
    tuning = Tuning(
        services,
        leases=planes.leases,
        max_jobs=planes.settings.max_tuning_jobs,
        is_draining=lambda: readiness.is_draining,
    )
    stack.push_async_callback(tuning.close)
    return tuning


def _check_packages(settings: Settings) -> None:
    """Raises InvalidValue if one is missing on this machine."""
    if settings.tuning_ray is not None:
        if find_spec("ray") is None:
            message = "--tuning-ray needs Ray: pip install 'loraplex[ray]'."
            raise InvalidValue(message, param="tuning_ray")
    elif missing := missing_packages():
        message = f"--tuning needs {' and '.join(missing)}: pip install 'loraplex[engine,tune]'."
        raise InvalidValue(message, param="tuning")


def _command(planes: Planes) -> Sequence[str]:
    """That of a trainer, or of its relay."""
    address = planes.settings.tuning_ray
    if address is None:
        return TRAINER_COMMAND
    base_id, num_cpus = planes.engine.info.base_id, planes.settings.tuning_ray_cpus
    return (*RELAY_COMMAND, *relay_arguments(address, base_id=base_id, num_cpus=num_cpus))


def _environment(settings: Settings) -> Mapping[str, str]:
    own = trainer_environment if settings.tuning_ray is None else relay_environment
    return own(os.environ)
