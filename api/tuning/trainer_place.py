"""Where the trainers of a server run, and the memory that each of them may take."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ...engine.memory.host_memory import available_host_bytes
from ...engine.tuning.cpu_list import parse_cpus
from ...engine.tuning.devices import AUTO, is_same_device
from ...platform.errors import InvalidValue
from ..settings import Settings

MAPPED_BYTES = 1 << 30
"""Address space of a trainer that is no memory: libraries and stacks that it maps."""
MEMORY_FRACTION = 0.9
"""The part of the machine's free memory that a trainer may take."""


@dataclass(frozen=True, slots=True)
class TrainerPlace:
    """The same for all trainers of a server."""

    device: str
    """`cpu` or a CUDA device."""
    cpus: tuple[int, ...] = ()
    """Those that the engine leaves to trainers; empty: all, which the engine uses too."""
    max_bytes: int | None = None
    """Of each trainer, on its device; None: no limit but what is free."""
    shares_engine: bool = True
    """Training takes time from the engine, so it pauses while that has requests."""
    is_here: bool = True
    """On this machine, and not on a node of Ray."""

    @property
    def is_host(self) -> bool:
        return self.device == "cpu"

    def free_bytes(self) -> int | None:
        """What a trainer that begins now may take; None: its device or node knows."""
        if not (self.is_host and self.is_here):
            return self.max_bytes
        most = int(MEMORY_FRACTION * available_host_bytes())
        return most if self.max_bytes is None else min(most, self.max_bytes)

    def address_bytes(self) -> int | None:
        """The limit on the address space of a trainer that begins now on this machine; None for
        CUDA, whose drivers map more than a machine has."""
        most = self.free_bytes()
        return MAPPED_BYTES + most if self.is_host and most is not None else None

    def device_bytes(self) -> int | None:
        """The limit on the memory of a CUDA device."""
        return None if self.is_host else self.max_bytes


def place_trainers(
    settings: Settings, *, engine_device: str, has_own_engine: bool = True
) -> TrainerPlace:
    """As the operator set it. Raises InvalidValue if CPUs for trainers cannot be used.

    engine_device: of the replicas, without an engine of the server's own. A replica may be on this
    machine.
    """
    if settings.tuning_ray is not None:
        return _place_on_ray(settings)
    device = settings.tuning_device
    if device == AUTO:
        device = engine_device if has_own_engine else "cpu"
    cpus = trainer_cpus(settings)
    if cpus and device != "cpu":
        message = f"--tuning-cpus: trainers run on {device}. Add --tuning-device cpu."
        raise InvalidValue(message, param="tuning_cpus")
    return TrainerPlace(
        device=device,
        cpus=cpus,
        max_bytes=_part_of_each(settings),
        shares_engine=not cpus and is_same_device(device, engine_device),
    )


def _place_on_ray(settings: Settings) -> TrainerPlace:
    """Raises InvalidValue for what only Ray can choose."""
    device = "cpu" if settings.tuning_device == AUTO else settings.tuning_device
    if settings.tuning_cpus is not None:
        message = "--tuning-cpus: with --tuning-ray, set --tuning-ray-cpus to their number."
        raise InvalidValue(message, param="tuning_cpus")
    if device not in ("cpu", "cuda"):
        message = f"--tuning-device {device}: with --tuning-ray, Ray chooses the GPU: set cuda."
        raise InvalidValue(message, param="tuning_device")
    return TrainerPlace(
        device=device, max_bytes=_part_of_each(settings), shares_engine=False, is_here=False
    )


def _part_of_each(settings: Settings) -> int | None:
    most = settings.tuning_bytes
    return None if most is None else most // settings.max_tuning_jobs


def trainer_cpus(settings: Settings) -> tuple[int, ...]:
    """Those that the engine leaves to trainers. Raises InvalidValue if the machine does not have
    them, or no others."""
    if not settings.tuning or settings.tuning_cpus is None or settings.tuning_ray is not None:
        return ()
    if not hasattr(os, "sched_getaffinity"):
        raise InvalidValue("--tuning-cpus works on Linux only.", param="tuning_cpus")
    cpus, here = parse_cpus(settings.tuning_cpus), os.sched_getaffinity(0)
    if missing := sorted(set(cpus) - here):
        message = f"--tuning-cpus: this process has no CPU {', '.join(map(str, missing))}."
        raise InvalidValue(message, param="tuning_cpus")
    if here <= set(cpus):
        message = "--tuning-cpus: no CPU is left for the engine."
        raise InvalidValue(message, param="tuning_cpus")
    return cpus
