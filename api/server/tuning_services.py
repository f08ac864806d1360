"""The service that trains adapters."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack

from ...engine.tuning.environment import trainer_environment
from ...platform.errors import InvalidValue
from ..adapters.pushes import Pushes
from ..batches.tenant_files import TenantFiles
from ..telemetry.metrics import Metrics
from ..telemetry.trainer_memories import TrainerMemories
from ..tuning.attempt import TrainerSetup
from ..tuning.job_run import RunServices
from ..tuning.publication import Publication
from ..tuning.trainer import TRAINER_COMMAND
from ..tuning.trainer_packages import missing_packages
from ..tuning.trainer_place import place_trainers
from ..tuning.tuning import Tuning
from ..tuning.work_folders import WorkFolders
from .planes import Planes
from .readiness import Readiness


def open_tuning(
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

    Raises InvalidValue for a server without an engine of its own, or without the packages.
    """
    if not planes.settings.tuning:
        return None
    if planes.membership is not None:
        message = "--tuning needs an engine on this machine: it cannot be used with a fleet."
        raise InvalidValue(message, param="tuning")
    if missing := missing_packages():
        message = f"--tuning needs {' and '.join(missing)}: pip install 'loraplex[engine,tune]'."
        raise InvalidValue(message, param="tuning")
    services = RunServices(
        server_id=planes.server_id,
        control_plane=planes.control_plane,
        files=files,
        folders=WorkFolders(planes.settings.data_dir / "tuning"),
        publication=Publication(pushes, planes.control_plane),
        trainers=TrainerSetup(
            command=TRAINER_COMMAND,
            environment=trainer_environment(os.environ),
            model=planes.bases.served,
            config=planes.engine_config,
            engine=planes.engine,
            place=place_trainers(planes.settings, engine_device=planes.engine.info.device),
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
