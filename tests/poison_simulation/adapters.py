"""The adapters of the simulated fleet: most are innocent, and a step of the others is the last."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from loraplex.adapters.identity import AdapterKey


@dataclass(frozen=True, slots=True)
class Poison:
    """What a step of the adapter does to its engine."""

    first_step: int = 0
    """Of a request: the steps before it are harmless."""
    probability: float = 1.0
    """Of each step from then on."""

    def kills(self, step: int, random: Random) -> bool:
        return step >= self.first_step and random.random() < self.probability


EVERY_STEP = Poison()


def innocent(number: int, num_tenants: int) -> AdapterKey:
    return AdapterKey(f"t{number % num_tenants}", f"innocent-{number:03}")


def poisonous(number: int) -> AdapterKey:
    """Of a tenant that has innocent ones too."""
    return AdapterKey(f"t{number}", f"poison-{number}")
