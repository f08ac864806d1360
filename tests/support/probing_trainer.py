"""A trainer that, in place of training, tries what its confinement has to prevent.

Its report is the message of Failed: the acts that are possible, as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from loraplex.adapters import confinement_probe as probe
from loraplex.engine.tuning import process
from loraplex.engine.tuning.errors import TuningError
from loraplex.engine.tuning.messages import Open


def run(order: Open, _connection: Any) -> None:
    """Instead of `loraplex.engine.tuning.run.run`."""
    training_file = Path(order.training_file)
    targets = probe._Targets(**json.loads(training_file.read_text()))
    acts: dict[str, Callable[[], object]] = {
        **probe._acts(targets),
        "write_training_file": partial(training_file.write_bytes, b"x"),
        "write_model": partial((Path(order.model) / "new").write_bytes, b"x"),
        "execute": lambda: os.execv(sys.executable, [sys.executable, "-c", "pass"]),
    }
    for name in ("fork", "exceed_time", "exceed_file_size", "exceed_open_files", "change_mode"):
        del acts[name]  # limits of examinations alone, and what nothing prevents
    possible = [name for name, act in acts.items() if probe._is_possible(act)]
    (Path(order.result_folder) / "written").write_bytes(b"x")
    found = {
        "possible": possible,
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "environment": sorted(os.environ),
        "torch": "torch" in sys.modules,
    }
    raise TuningError(json.dumps(found))


if __name__ == "__main__":
    stand_in: Any = ModuleType("loraplex.engine.tuning.run")
    stand_in.run = run
    sys.modules["loraplex.engine.tuning.run"] = stand_in
    process.main()
