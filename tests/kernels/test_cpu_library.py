"""Compiling, keeping and finding the CPU's library."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from loraplex.kernels import cpu_library
from loraplex.kernels.cpu_library import FLAGS, SOURCES, CpuLibrary
from support.cpu_kernels import multiplies_bfloat16, needs_cpu_library
from support.synced import record_synced

compile_again = cpu_library.cpu_library.__wrapped__
"""Without what this process remembers."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "loraplex"


@pytest.fixture
def kept(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a library of one empty function, which is compiled at once."""
    sources = tmp_path / "sources"
    sources.mkdir()
    function = 'extern "C" void use_parallel_region(void*) {}\n'
    (sources / "kernels.cpp").write_text(function)
    monkeypatch.setattr(cpu_library, "SOURCES", sources)
    monkeypatch.setattr(cpu_library, "_digest", lambda _compiler: "digest")
    cache.mkdir(mode=0o700)
    return cache / "cpu-digest.so"


@needs_cpu_library
def test_is_on_the_disk_before_it_has_its_name(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = record_synced(monkeypatch)
    assert compile_again().functions is not None
    written, folder = synced
    assert written.name == kept.name
    assert written.parent.parent == folder == kept.parent


@needs_cpu_library
@pytest.mark.parametrize("content", [b"", bytes(8192)])
def test_a_damaged_file_is_compiled_again(kept: Path, content: bytes) -> None:
    kept.write_bytes(content)
    assert compile_again().functions is not None
    assert kept.read_bytes() != content


def test_a_compiler_compiles_it() -> None:
    library = cpu_library.cpu_library()
    if library.detail != "no C++ compiler":
        assert library.functions is not None, library.detail


@pytest.mark.slow
@needs_cpu_library
def test_is_compiled_once_for_a_source_and_a_processor(cache: Path) -> None:
    first = compile_again()
    assert first.functions is not None
    (library,) = cache.iterdir()
    written = library.stat().st_mtime_ns
    assert cache.stat().st_mode & 0o777 == 0o700
    assert compile_again().functions is not None
    (again,) = cache.iterdir()
    assert (again, again.stat().st_mtime_ns) == (library, written)


@needs_cpu_library
def test_another_source_is_another_library(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = "c++"
    before = cpu_library._digest(compiler)
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in SOURCES.iterdir():
        (changed / path.name).write_bytes(path.read_bytes())
    (changed / "vector.h").write_text("// changed")
    monkeypatch.setattr(cpu_library, "SOURCES", changed)
    assert cpu_library._digest(compiler) != before
    assert compile_again().functions is None
    assert list(cache.iterdir()) == [], "what does not compile leaves nothing"


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("PATH", str(cache))
    assert compile_again() == CpuLibrary(None, "no C++ compiler")


@needs_cpu_library
def test_a_folder_that_others_may_write_to_is_not_used(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    found = compile_again()
    assert found.functions is None
    assert "can be written by others" in found.detail


@needs_cpu_library
def test_nothing_is_compiled_where_code_cannot_be_run(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = SimpleNamespace(f_flag=os.ST_NOEXEC)
    monkeypatch.setattr(os, "statvfs", lambda _path: mounted)
    found = compile_again()
    assert found.functions is None
    assert found.detail.endswith(f"{kept.parent} is mounted noexec")
    assert list(kept.parent.iterdir()) == []


@needs_cpu_library
def test_a_compiler_that_does_not_end_is_given_up(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(command: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(cpu_library, "_digest", lambda _compiler: "digest")
    monkeypatch.setattr(subprocess, "run", hang)
    found = compile_again()
    assert found.functions is None
    assert "timed out" in found.detail


def test_no_function_is_there_for_other_types() -> None:
    assert cpu_library.function("rms_norm", torch.float16) is None
    assert cpu_library.function("attend_prompts", torch.float32) is None


@needs_cpu_library
def test_bf16_is_multiplied_where_the_processor_has_the_instructions() -> None:
    assert multiplies_bfloat16() is torch.cpu._is_avx512_bf16_supported()


@needs_cpu_library
def test_threads_are_those_of_pytorch() -> None:
    assert cpu_library._parallel_region() is not None


@needs_cpu_library
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of x86-64")
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3", "x86-64-v4", "sapphirerapids"])
def test_compiles_without_a_warning_for_every_width_of_vectors(
    processor: str, tmp_path: Path
) -> None:
    flags = [flag for flag in FLAGS if not flag.startswith("-march")]
    warnings = ("-Wall", "-Wextra", "-Werror")
    command = ["c++", *flags, f"-march={processor}", *warnings, str(SOURCES / "kernels.cpp")]
    subprocess.run([*command, "-o", str(tmp_path / "library.so")], check=True)
