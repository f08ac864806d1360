"""`loraplex` that also counts its asyncio tasks: `python -m benchmarks.counted_server`.

At each SIGUSR1 it writes the number to the file named by `TASKS_FILE` in the environment.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path
from types import FrameType

from loraplex.api.cli import main

TASKS_FILE = "CROWD_TASKS_FILE"


def count_tasks(_number: int, _frame: FrameType | None) -> None:
    """Of those that have not ended, wherever they wait."""
    tasks = (each for each in gc.get_objects() if isinstance(each, asyncio.Task))
    target = Path(os.environ[TASKS_FILE])
    unfinished = target.with_suffix(".new")
    unfinished.write_text(str(sum(not task.done() for task in tasks)))
    unfinished.replace(target)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, count_tasks)
    main()
