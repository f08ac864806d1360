"""Runs a command as in an older container runtime, with `unshare` and Landlock forbidden.

`python container_profile.py PROGRAM ARGUMENT...`. The filter returns EPERM for both, as the default
profiles of older runtimes do, and applies to all child processes.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

_UNSHARE = {"x86_64": 272, "aarch64": 97}
_LANDLOCK_CREATE_RULESET = 444
_EPERM = 1
_SET_SECCOMP, _FILTER, _SET_NO_NEW_PRIVILEGES = 22, 2, 38
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def forbid_confinement() -> None:
    """From here on this process and its children cannot make namespaces or use Landlock."""
    steps = (
        (_LOAD, 0, 0, 0),  # the number of the system call
        (_EQUAL, 1, 0, _UNSHARE[platform.machine()]),
        (_EQUAL, 0, 1, _LANDLOCK_CREATE_RULESET),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    )
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    program = _Program(len(steps), code)
    if prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    forbid_confinement()
    os.execv(sys.argv[1], sys.argv[1:])
