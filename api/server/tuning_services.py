"""The service that trains adapters."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack

from ...engine.tuning.environment import trainer_environment
from ...platform.errors import InvalidValue
from ..adapters.pushes import Pushes
from ..batches.tenant_files import TenantFiles
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
    if missing := missing_packages():
        message = f"--tuning needs {' and '.join(missing)}: pip install 'loraplex[engine,tune]'."
        raise InvalidValue(message, param="tuning")
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
            command=TRAINER_COMMAND,
            environment=trainer_environment(os.environ),
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
