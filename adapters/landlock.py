"""Linux's Landlock: a process gives up the right to write files and to use TCP, for good.

Any process may do it, where the kernel knows Landlock (5.13 and later; TCP 6.7 and later).
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_GET_VERSION = 1
_RULE_PATH_BENEATH = 1
_SET_NO_NEW_PRIVILEGES = 38

_WRITE_FILE = 1 << 1
_MAKE_FILE = 1 << 8
_CHANGES = sum(
    1 << bit
    for bit in (1, *range(4, 13))  # write, remove, make: every right but to execute and to read
)
_MOVE = 1 << 13
_TRUNCATE = 1 << 14
_TCP = 0b11  # bind and connect


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64), ("handled_access_net", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def landlock_version() -> int:
    """What the kernel offers; 0: nothing."""
    if sys.platform != "linux":
        return 0
    return max(0, _syscall(_CREATE_RULESET, None, 0, _GET_VERSION))


def allow_new_files_only_in(directory: Path) -> bool:
    """Keep this thread from changing any file but those in `directory`, and from TCP.

    Threads and processes that it starts inherit it. Reading is as before, and so is writing to
    files that are open. False: the kernel does not know Landlock, and nothing has changed.
    """
    version = landlock_version()
    if not version:
        return False
    handled = _CHANGES | (_MOVE if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    ruleset = _Ruleset(handled, _TCP if version >= 4 else 0)
    size = ctypes.sizeof(ruleset) if version >= 4 else ctypes.sizeof(ctypes.c_uint64)
    ruleset_fd = _syscall(_CREATE_RULESET, ctypes.byref(ruleset), size, 0)
    directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        rule = _PathBeneath(_WRITE_FILE | _MAKE_FILE, directory_fd)
        _checked(_syscall(_ADD_RULE, ruleset_fd, _RULE_PATH_BENEATH, ctypes.byref(rule), 0))
        _checked(ctypes.CDLL(None, use_errno=True).prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _checked(_syscall(_RESTRICT_SELF, ruleset_fd, 0))
    finally:
        os.close(directory_fd)
        os.close(ruleset_fd)
    return True


def _syscall(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    values = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    result: int = libc.syscall(ctypes.c_long(number), *values)
    return result


def _checked(result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
