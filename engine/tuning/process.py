"""The trainer process: `python -m loraplex.engine.tuning.process`.

It trains one adapter. Standard input is a socket to the server (see `messages`); when it closes,
the process ends. The first message says what to train. The process confines itself before it
imports torch or reads the data.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Never

from ...adapters.json_frames import MessageRefused
from ...adapters.logs import log_to_stderr
from .confinement import confine_trainer, limit_memory
from .connection import Connection
from .errors import InsufficientTrainingMemory, InvalidTrainingData, TuningError
from .messages import Failed, Open

SCRATCH_FOLDER = ".scratch"
_NO_MEMORY = (
    "not enough memory",
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
)
"""How torch, which raises RuntimeError, and the system say that memory is out."""

_log = logging.getLogger("loraplex.engine.tuning.process")  # its own name is "__main__"


def main() -> Never:
    """Train what the socket on standard input asks for."""
    faulthandler.enable()
    log_to_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C reaches the group: the server decides
    connection = Connection(socket.socket(fileno=os.dup(sys.stdin.fileno())))
    try:
        failure = _train(connection)
    except MessageRefused:
        _log.exception("trainer_message_not_understood")
        os._exit(1)
    if failure is not None:
        connection.send(failure)
    os._exit(1 if failure else 0)


def _train(connection: Connection) -> Failed | None:
    """Train what the first message describes. Returns why that fails. Raises MessageRefused."""
    order = connection.receive()
    if not isinstance(order, Open):
        raise MessageRefused(f"{type(order).__name__} came before Open")
    try:
        for mechanism, reason in confine_trainer(order).items():
            _log.warning("trainer_not_confined", extra={"lacks": mechanism, "reason": reason})
        _set_temporary_folder(Path(order.checkpoint_folder) / SCRATCH_FOLDER)
        from .run import run  # not before the process is confined: it imports torch

        limit_memory(order)
        run(order, connection)
    except MessageRefused:
        raise
    except TuningError as exc:
        line = exc.line if isinstance(exc, InvalidTrainingData) else None
        return Failed(exc.code, str(exc), line)
    except ModuleNotFoundError as exc:
        return Failed(TuningError.code, f"no {exc.name}: pip install 'loraplex[engine,tune]'")
    except Exception as exc:  # whatever fails, the server has to hear of it
        if isinstance(exc, MemoryError) or any(text in str(exc) for text in _NO_MEMORY):
            return Failed(
                InsufficientTrainingMemory.code,
                "training needs more memory than the process may take",
            )
        _log.exception("training_failed")
        return Failed(TuningError.code, f"training failed: {type(exc).__name__}")
    return None


def _set_temporary_folder(folder: Path) -> None:
    """Libraries look for one when they are imported, and no other can be written."""
    folder.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(folder)


if __name__ == "__main__":
    main()
