"""Slices of tensors in safetensors files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loraplex.engine.checkpoint.file_slices import DTYPES, FileSlices
from loraplex.engine.errors import DamagedBase

SLICES: list[slice | tuple[slice, slice]] = [
    slice(0, 3),
    slice(5, 9),
    slice(11, 40),
    slice(4, 4),
    (slice(None), slice(2, 5)),
    (slice(3, 6), slice(0, 7)),
]


def save(path: Path, values: torch.Tensor) -> None:
    others = {"first": torch.ones(5), "last": torch.ones(3, dtype=torch.int8)}
    save_file({**others, "values": values}, path)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_slices_are_those_of_the_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randint(0, 100, (13, 7)).to(dtype)
    save(tmp_path / "file", values)
    stored = FileSlices(tmp_path / "file", "values")
    assert (stored.shape, stored.dtype) == (values.shape, dtype)
    for index in SLICES:
        found = stored[index]
        assert found.dtype == dtype
        assert torch.equal(found.float(), values[index].float())


def test_rows_of_a_vector_are_numbers(tmp_path: Path) -> None:
    values = torch.arange(9)
    save(tmp_path / "file", values)
    assert torch.equal(FileSlices(tmp_path / "file", "values")[2:5], values[2:5])


def bytes_read() -> int:
    """By this process so far, from files and others."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's counts of bytes")
def test_only_the_bytes_of_a_slice_are_read(tmp_path: Path) -> None:
    save(tmp_path / "file", torch.ones(4096, 1024))
    stored = FileSlices(tmp_path / "file", "values")
    before = bytes_read()
    rows, columns = stored[64:72], stored[:, 16:32]
    assert bytes_read() - before < rows.nbytes + columns.nbytes + 2**14


def test_a_file_that_became_shorter_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save(path, torch.ones(64, 64))
    stored = FileSlices(path, "values")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DamagedBase, match="became shorter"):
        stored[32:40]
    path.unlink()
    with pytest.raises(DamagedBase, match="cannot be read"):
        stored[0:1]
