"""Ends a process together with the one that started it, whatever the parent's end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from types import FrameType
from typing import Never

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """SIGTERM, or the parent's death of any cause, ends this process immediately.

    The kernel's signal covers a process that is stuck in native code; the watch on standard input
    covers other systems and a parent that died before the signal was requested.
    """
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C reaches the group: the parent decides
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch_parent, daemon=True).start()


def _watch_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


def _exit(_signal: int, _frame: FrameType | None) -> Never:
    os._exit(0)
