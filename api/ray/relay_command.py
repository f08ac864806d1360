"""How a server starts relays of trainers. Needs no Ray: servers do not import it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...engine.tuning.environment import trainer_environment

RELAY_COMMAND = (sys.executable, "-P", "-m", "loraplex.api.ray.trainer_relay")


def relay_arguments(address: str, *, base_id: str, num_cpus: int) -> Sequence[str]:
    """Those of the relay. `base_id`: of the base that is served. `num_cpus`: of each trainer."""
    return (address, base_id, str(num_cpus))


def relay_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """That of a trainer, and what finds the cluster. The server sets the home and the folder of
    temporary files of its trainers, where Ray looks for its token and its node."""
    of_ray = {name: value for name, value in environment.items() if name.startswith("RAY_")}
    home = environment.get("HOME", str(Path.home()))
    found_there = {
        "RAY_AUTH_TOKEN_PATH": str(Path(home) / ".ray" / "auth_token"),
        "RAY_TMPDIR": tempfile.gettempdir(),
    }
    return {**trainer_environment(environment), **found_there, **of_ray}
