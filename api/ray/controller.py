"""The detached actor that keeps a fleet at its wanted number of replicas."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
import structlog

from ...platform.database import Database
from ...platform.errors import PlatformError
from ..settings import load_settings
from .autoscaling import Autoscaler
from .cluster import NAMESPACE
from .ray_placement import RayPlacement
from .reconciler import Reconciler, ReplicaStatus
from .replica_actor import ReplicaSpec

NAME = "loraplex-controller"
LOOK_SECONDS = 1.0
HEAD = "node:__internal_head__"
"""Ray's name for its head as a resource."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """What a fleet is started with. Ray keeps and shows it: it has no secrets."""

    replica: ReplicaSpec
    max_drain_seconds: float
    limits: tuple[int, int] | None
    """The least and the most replicas of autoscaling; None: the number is only set."""


class Controller:
    """Reconciles every second. If Ray restarts it, it finds in Ray and in the database what there
    is and what there shall be."""

    def __init__(self, spec: FleetSpec) -> None:
        """Raises a PlatformError if the database that LORAPLEX_DATABASE names on the head is not
        there or has another schema."""
        database = Database(load_settings().database_url)
        database.check_revision()
        self._reconciler = Reconciler(
            RayPlacement(spec.replica),
            database,
            max_drain_seconds=spec.max_drain_seconds,
            autoscaler=None if spec.limits is None else Autoscaler(*spec.limits),
        )
        threading.Thread(target=self._repeat, daemon=True).start()

    def scale(self, number: int) -> None:
        """There shall be this number of replicas."""
        self._reconciler.scale(number)

    def status(self) -> Sequence[ReplicaStatus]:
        """The replicas as of the last round."""
        return self._reconciler.status()

    def _repeat(self) -> None:
        pause = threading.Event()
        while not pause.wait(LOOK_SECONDS):
            try:
                self._reconciler.look()
            except (PlatformError, ray.exceptions.RayError) as exc:
                log.warning("fleet_not_reconciled", error=str(exc))
            except Exception:  # a defect in one round must not stop the next ones
                log.exception("fleet_not_reconciled")


def start_controller(spec: FleetSpec) -> Any:
    """Start it on the head, which has the database's URL in its environment; returns a handle.

    Raises ValueError if there is one already.
    """
    return (
        ray.remote(Controller)
        .options(
            name=NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            resources={HEAD: 0.001},
        )
        .remote(spec)
    )


def find_controller() -> Any:
    """A handle of the fleet's controller; None if there is none."""
    try:
        return ray.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        return None
