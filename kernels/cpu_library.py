"""The kernels for the CPU: C++ in `cpu/`, compiled on the machine that runs them.

The compiler is the one that Triton's launchers need on CUDA as well. It compiles for the very
processor, once: the library is kept in the user's cache folder under a digest of its source, of the
compiler and of the processor. Without a compiler, PyTorch's operations serve, which are slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

SOURCES = Path(__file__).parent / "cpu"
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=off"),
    *("-fPIC", "-shared", "-fno-exceptions", "-fno-rtti"),
)
COMPILE_SECONDS = 120.0

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "rms_norm": (_P, _P, _P, _N, _N, _F, _N, _N),
    "rotary": (_P, _P, _P, _P, _N, _N, _N, _N, _N, _N),
    "gated_activation": (_P, _P, _P, _N, _N, _N, _N, _N, _N),
    "linear": (_P, _P, _P, _P, _N, _N, _N, _N),
    "linear_half": (_P, _P, _P, _P, _N, _N, _N, _N),
    "int8_linear": (_P, _P, _P, _P, _P, _P, _N, _N, _N, _N),
    "quantized_linear": (*(_P, _P, _P, _N, _P, _N, _P, _P, _P), *(_N,) * 5),
    "attend": (_P, _P, _P, _P, _P, _P),
    "attend_prompts": (_P, _P, _P, _P, _P, _P),
    "attend_groups": (_P, _P, _P, _P, _P, _P),
    "draft_layer": (_P, _P, _P, _P, _P, _P),
    "decoder_layer": (_P, _P, _P, _P, _P, _P, _P, _P, ctypes.c_bool),
    "recur": (_P, _P, _P, _P),
    "selective_scan": (_P, _P, _P, _P, _P),
    "gumbel_noise": (_P, _P, _N, _P, _N, _N, _N),
    "penalize": (_P, _P, _N, _P, _P, _N, _F, _F, _F),
    "add_lora": (_P, _P, _P, _P, _P, _P, _N, _N, _N, _N, _N),
}
"""The parameters of the library's functions, in the order of their declarations."""
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class CpuLibrary(NamedTuple):
    """The compiled kernels, or why there are none."""

    functions: ctypes.CDLL | None
    detail: str


@cache
def function(name: str, kind: torch.dtype | str) -> Callable[..., None] | None:
    """A function for elements of this kind; None where PyTorch's operations serve."""
    functions = cpu_library().functions
    suffix = _DTYPES.get(kind) if isinstance(kind, torch.dtype) else kind
    if functions is None or suffix is None:
        return None
    symbol = f"{name}_{suffix}"
    if not hasattr(functions, symbol):  # the processor lacks its instructions
        return None
    found = functions[symbol]
    found.argtypes, found.restype = _SIGNATURES[name], None
    return found


@cache
def cpu_library() -> CpuLibrary:
    """Load the library, and compile it first where that has not been done."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return CpuLibrary(None, "no C++ compiler")
    try:
        functions = _loaded(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        return CpuLibrary(None, f"{compiler}: {_reason(error)}")
    functions.use_parallel_region(_parallel_region())
    return CpuLibrary(functions, f"compiled by {compiler}")


def _loaded(compiler: str) -> ctypes.CDLL:
    path = _cache_folder() / f"cpu-{_digest(compiler)}.so"
    if path.exists():
        with suppress(OSError):  # damaged: the new one replaces it
            return ctypes.CDLL(str(path))
    _compile(compiler, path)
    return ctypes.CDLL(str(path))


def _compile(compiler: str, path: Path) -> None:
    """Compile the library and put it in its place, durably."""
    with tempfile.TemporaryDirectory(dir=path.parent) as made:
        output = Path(made, path.name)
        command = [compiler, *FLAGS, str(SOURCES / "kernels.cpp"), "-o", str(output)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
        _sync(output)  # a library whose pages were lost would crash each process that loads it
        output.replace(path)  # whole, whoever else compiles it at this moment
        _sync(path.parent)


def _sync(path: Path) -> None:
    """Write the file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cache_folder() -> Path:
    """The folder of the library, which runs in this process.

    Raises OSError unless the folder is the user's alone and code in it can be run.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root, "loraplex")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} can be written by others")
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise PermissionError(f"{folder} is mounted noexec")  # else each start would compile
    return folder


def _digest(compiler: str) -> str:
    """Of all that the compiled code depends on."""
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    version = [compiler, "--version"]
    digest.update(subprocess.run(version, check=True, capture_output=True, timeout=60).stdout)
    processor = Path("/proc/cpuinfo")
    if processor.exists():
        lines = processor.read_text().splitlines()
        digest.update("".join(sorted({line for line in lines if _is_feature(line)})).encode())
    return digest.hexdigest()[:32]


def _is_feature(line: str) -> bool:
    return line.startswith(("flags", "Features", "model name"))


def _parallel_region() -> ctypes.c_void_p | None:
    """The entry to a parallel region of PyTorch's OpenMP; None: the kernels use one thread.

    A preloaded OpenMP library comes first, as it does for PyTorch.
    """
    own = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for library in (None, str(own)):
        try:
            return ctypes.cast(ctypes.CDLL(library).GOMP_parallel, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").splitlines()
        return next((line for line in lines if "error" in line), f"exit status {error.returncode}")
    return str(error)
