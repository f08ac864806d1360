"""Linux's Landlock: a process irrevocably gives up access to files and TCP.

Any process may use it if the kernel supports Landlock (5.13 and later; TCP 6.7 and later).
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_GET_VERSION = 1
_RULE_PATH_BENEATH, _RULE_PORT = 1, 2
_SET_NO_NEW_PRIVILEGES = 38
_WHY_NOT = {
    errno.ENOSYS: "the kernel has no Landlock (Linux 5.13 and later have it)",
    errno.EOPNOTSUPP: "Landlock is off: add it to the `lsm=` list of the kernel's command line",
    errno.EPERM: "a seccomp profile forbids Landlock: allow the `landlock_*` system calls",
}

_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_FOLDER = 1 << 3
_FIRST_RIGHTS = (1 << 13) - 1
"""Execute, write, read, remove, make: the rights of the first version."""
_CHANGE_FOLDER = sum(1 << bit for bit in (4, 5, 7, 8))
"""Remove folders and files, make folders and regular files."""
_MOVE = 1 << 13
_TRUNCATE = 1 << 14
_CONNECT = 1 << 1
_TCP = 1 | _CONNECT  # bind and connect
_SCOPES = 0b11  # abstract UNIX sockets and signals


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


class _Port(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("port", ctypes.c_uint64))


def landlock_version() -> int:
    """The version that the kernel supports; 0: none."""
    if sys.platform != "linux":
        return 0
    return max(0, _syscall(_CREATE_RULESET, None, 0, _GET_VERSION))


def why_no_landlock() -> str | None:
    """The reason why Landlock is unavailable, and what to do; None if it is available."""
    if landlock_version():
        return None
    if sys.platform != "linux":
        return "only Linux has it"
    reason = ctypes.get_errno()
    return _WHY_NOT.get(reason, os.strerror(reason))


def forbid_new_privileges() -> None:
    """No program that this process starts gets further privileges, by set-user-ID or otherwise."""
    _checked(ctypes.CDLL(None, use_errno=True).prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))


def allow_only(*, read: Iterable[Path], write: Iterable[Path], connect: Iterable[int] = ()) -> bool:
    """Restrict this thread to these files, and to TCP connections to these ports.

    `read`: folders with their contents, and files. `write`: existing files, which may be read too,
    and existing folders, in which files and folders may also be made, moved and removed.
    `connect`: ports; kernels before 6.7 do not restrict TCP. Missing paths are skipped. New threads
    and processes inherit the restriction; open files stay usable. Returns False without any effect
    if the kernel does not support Landlock.
    """
    version = landlock_version()
    if not version:
        return False
    truncate = _TRUNCATE if version >= 3 else 0
    handled = _FIRST_RIGHTS | (_MOVE if version >= 2 else 0) | truncate
    ruleset = _Ruleset(handled, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    num_fields = 1 + (version >= 4) + (version >= 6)
    ruleset_fd = _syscall(_CREATE_RULESET, ctypes.byref(ruleset), 8 * num_fields, 0)
    try:
        for path in read:
            _allow(ruleset_fd, path, _READ_FILE | (_READ_FOLDER if path.is_dir() else 0))
        for path in write:
            rights = _READ_FILE | _WRITE_FILE | truncate
            if path.is_dir():
                rights |= _READ_FOLDER | _CHANGE_FOLDER | (_MOVE if version >= 2 else 0)
            _allow(ruleset_fd, path, rights)
        for port in connect if version >= 4 else ():
            rule = _Port(_CONNECT, port)
            _checked(_syscall(_ADD_RULE, ruleset_fd, _RULE_PORT, ctypes.byref(rule), 0))
        forbid_new_privileges()
        _checked(_syscall(_RESTRICT_SELF, ruleset_fd, 0))
    finally:
        os.close(ruleset_fd)
    return True


def _allow(ruleset_fd: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH)
    except FileNotFoundError:
        return
    try:
        rule = _PathBeneath(rights, descriptor)
        _checked(_syscall(_ADD_RULE, ruleset_fd, _RULE_PATH_BENEATH, ctypes.byref(rule), 0))
    finally:
        os.close(descriptor)


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
