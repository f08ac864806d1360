"""What is simulated: servers, replicas, traffic and poison."""

from __future__ import annotations

from dataclasses import dataclass

from .adapters import EVERY_STEP, Poison

NUM_REPLICAS = 8
NUM_ADAPTERS = 60
"""Innocent ones, of Zipf 1 popularity."""
NUM_NEW = 10
"""Of these, the least popular ones: they have never been asked for."""
NUM_TENANTS = 12
READY_SECONDS = 8.0
"""From the start until all engines serve and the innocents' traffic begins."""
OUTBREAK_SECONDS = 10.0
"""When the first requests for the poisonous adapters come, from all servers at once."""
LATE_SECONDS = 22.0
"""When a server starts that knows nothing yet: all engines serve again."""
END_SECONDS = 27.0
REQUESTS_PER_SECOND = 20.0
"""For innocent adapters, of all servers."""
BURST_SIZE = 20
"""Requests for each poisonous adapter that come at once to each server."""
POISON_PER_SECOND = 10.0
"""Requests for each poisonous adapter afterwards, of all servers."""
MEAN_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    num_servers: int = 3
    num_poisons: int = 1
    poison: Poison = EVERY_STEP
    has_late_server: bool = False
    """Whether one more server starts at LATE_SECONDS."""
    num_kills: int = 0
    """Engines that something else ends, at any time from READY_SECONDS on."""
