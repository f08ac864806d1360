from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters import safetensors_header
from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.safetensors_header import TensorEntry, read_safetensors_header
from support.safetensors_files import make_entry, make_file, make_tensors

TWO = {"a": make_entry([2, 3]), "b": make_entry([4], begin=24)}
TWO_PAYLOAD = bytes(range(40))
VALID = make_file(TWO, TWO_PAYLOAD)


def read(data: bytes) -> dict[str, TensorEntry]:
    return read_safetensors_header(io.BytesIO(data), len(data))


def refusal(data: bytes) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as caught:
        read(data)
    return caught.value


def with_entry(**fields: Any) -> bytes:
    return make_file({"a": {**make_entry([2, 3]), **fields}}, bytes(24))


def test_finds_what_the_library_wrote(tmp_path: Path) -> None:
    tensors: dict[str, npt.NDArray[Any]] = {
        "x.lora_A.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "x.lora_B.weight": np.arange(10, dtype=np.float16).reshape(5, 2),
    }
    path = tmp_path / "file.safetensors"
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    data = path.read_bytes()
    entries = read(data)
    assert entries.keys() == tensors.keys()
    for name, values in tensors.items():
        entry = entries[name]
        assert entry.shape == values.shape
        assert data[entry.offset : entry.offset + entry.num_bytes] == values.tobytes()


def test_returns_tensors_in_file_order() -> None:
    reversed_header = {"b": TWO["b"], "a": TWO["a"]}
    assert list(read(make_file(reversed_header, TWO_PAYLOAD))) == ["a", "b"]


MALFORMED = {
    "empty file": (b"", "not_safetensors"),
    "seven bytes": (b"\x10" + bytes(6), "not_safetensors"),
    "zip archive": (b"PK\x03\x04" + bytes(100), "pickle_refused"),
    "pickle protocol 2": (b"\x80\x02}q\x00(X\x03\x00\x00\x00", "pickle_refused"),
    "pickle protocol 4": (b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00", "pickle_refused"),
    "pickle protocol 5": (b"\x80\x05" + b"\x95" * 6, "pickle_refused"),
    "pickle protocol unheard of": (b"\x80\x06" + b"\x95" * 6, "not_safetensors"),
    "no pickle but a bit alike": (b"\x81\x04" + b"\x95" * 6, "not_safetensors"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(64), "not_safetensors"),
    "length beyond the file": (b"\xff" * 8 + b"{}", "not_safetensors"),
    "no json": (make_file(b"[]"), "not_safetensors"),
    "truncated header": (VALID[:20], "file_size_mismatch"),
    "truncated payload": (VALID[:-1], "file_size_mismatch"),
    "trailing byte": (VALID + b"\x00", "file_size_mismatch"),
    "broken json": (make_file(b'{"a": '), "malformed_header"),
    "not utf-8": (make_file(b'{"\xff": 1}'), "malformed_header"),
    "deep nesting": (make_file(b'{"a":' + b"[" * 100_000), "malformed_header"),
    "huge integer": (make_file(b'{"a":' + b"9" * 10_000 + b"}"), "malformed_header"),
    "not a number": (make_file(b'{"a": NaN}'), "malformed_header"),
    "number out of range": (make_file(b'{"a": 1e999}'), "malformed_header"),
    "metadata not texts": (make_file({"__metadata__": {"a": 1}, **TWO}), "malformed_header"),
    "no tensors": (make_file({}), "no_tensors"),
    "only metadata": (make_file({"__metadata__": {}}), "no_tensors"),
    "same name twice": (make_file(b'{"a": {}, "a": {}}'), "duplicate_key"),
    "same field twice": (make_file(b'{"a": {"dtype": "F32", "dtype": "F16"}}'), "duplicate_key"),
    "empty name": (make_file({"": make_entry([1])}, bytes(4)), "invalid_tensor_name"),
    "long name": (make_file({"a" * 257: make_entry([1])}, bytes(4)), "invalid_tensor_name"),
    "path as name": (make_file({"../a": make_entry([1])}, bytes(4)), "invalid_tensor_name"),
    "terminal codes": (make_file({"a\x1b[2J": make_entry([1])}, bytes(4)), "invalid_tensor_name"),
    "newline in name": (make_file({"a\nb": make_entry([1])}, bytes(4)), "invalid_tensor_name"),
    "entry not an object": (make_file({"a": [1]}), "malformed_header"),
    "entry with more": (with_entry(stride=[1]), "malformed_header"),
    "entry with less": (make_file({"a": {"dtype": "F32", "shape": [1]}}), "malformed_header"),
    "dtype not text": (with_entry(dtype=4), "malformed_header"),
    "integers": (with_entry(dtype="I64"), "unsupported_dtype"),
    "float8": (with_entry(dtype="F8_E4M3"), "unsupported_dtype"),
    "hostile dtype": (with_entry(dtype="\x1b[2J" * 100), "unsupported_dtype"),
    "shape not a list": (with_entry(shape="6"), "malformed_header"),
    "negative size": (with_entry(shape=[-2, -3]), "malformed_header"),
    "boolean size": (with_entry(shape=[True, 6]), "malformed_header"),
    "fractional size": (with_entry(shape=[2.0, 3.0]), "malformed_header"),
    "four dimensions": (with_entry(shape=[2, 3, 1, 1]), "invalid_shape"),
    "zero size": (with_entry(shape=[0, 1 << 40], data_offsets=[0, 0]), "invalid_shape"),
    "shape too large": (with_entry(shape=[1 << 62, 1 << 62]), "invalid_offsets"),
    "shape too small": (with_entry(shape=[5]), "invalid_offsets"),
    "one offset": (with_entry(data_offsets=[24]), "malformed_header"),
    "negative offset": (with_entry(data_offsets=[-24, 0]), "malformed_header"),
    "offsets reversed": (with_entry(data_offsets=[24, 0]), "invalid_offsets"),
    "hole at the start": (with_entry(data_offsets=[8, 32]), "invalid_offsets"),
    "overlap": (
        make_file({"a": make_entry([2]), "b": make_entry([2], begin=4)}, bytes(12)),
        "invalid_offsets",
    ),
    "hole": (
        make_file({"a": make_entry([2]), "b": make_entry([2], begin=12)}, bytes(20)),
        "invalid_offsets",
    ),
    "same bytes twice": (
        make_file({"a": make_entry([2]), "b": make_entry([2])}, bytes(8)),
        "invalid_offsets",
    ),
}


@pytest.mark.parametrize(("data", "reason"), MALFORMED.values(), ids=MALFORMED.keys())
def test_refuses(data: bytes, reason: str) -> None:
    error = refusal(data)
    assert error.reason == reason
    assert str(error).isprintable()
    assert len(str(error)) < 500


def test_a_name_may_be_as_long_as_the_limit() -> None:
    assert list(read(make_file({"a" * 256: make_entry([1])}, bytes(4)))) == ["a" * 256]


def test_refuses_a_header_over_the_limit_that_is_really_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", 100)
    at_limit = make_file(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(100), b"abcd"
    )
    assert read(at_limit).keys() == {"a"}
    assert refusal(make_file(b"{}".ljust(101), bytes(1000))).reason == "header_too_large"


def test_refuses_more_tensors_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_header, "MAX_TENSORS", 2)
    assert len(read(VALID)) == 2
    three = {**TWO, "c": make_entry([1], begin=40)}
    assert refusal(make_file(three, bytes(44))).reason == "too_many_tensors"


def test_points_to_the_tensor_at_fault() -> None:
    assert refusal(with_entry(shape=[5])).pointer == "a"


def library_reading(data: bytes) -> dict[str, tuple[list[int], bytes]]:
    tensors: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    return {name: (tensor["shape"], bytes(tensor["data"])) for name, tensor in tensors}


SAMPLE = make_tensors(
    {
        "m.lora_A.weight": np.ones((2, 3), np.float32),
        "m.lora_B.weight": np.ones((5, 2), np.float32),
    }
)


@given(
    flips=st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), max_size=4),
    length=st.one_of(st.just(len(SAMPLE)), st.integers(0, len(SAMPLE))),
)
def test_damaged_files_are_refused_or_read_as_the_library_reads_them(
    flips: list[tuple[int, int]], length: int
) -> None:
    damaged = bytearray(SAMPLE)
    for position, value in flips:
        damaged[position] = value
    data = bytes(damaged[:length])
    try:
        entries = read(data)
    except AdapterRejected:
        return
    assert {
        name: (list(entry.shape), data[entry.offset : entry.offset + entry.num_bytes])
        for name, entry in entries.items()
    } == library_reading(data)
