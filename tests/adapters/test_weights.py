from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters import weights
from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.safetensors_header import TensorEntry
from loraplex.adapters.weights import (
    check_range,
    content_bytes,
    delta_norm,
    from_float32,
    read_tensor,
    to_float32,
)

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def test_widens_bfloat16_exactly_as_torch_does() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(
        to_float32(bits, "BF16").view(np.uint32), expected.view(np.uint32)
    )


@pytest.mark.parametrize(("dtype", "item"), [("BF16", np.uint16), ("F16", np.float16)])
def test_narrows_what_was_widened_to_the_same_bits(dtype: str, item: type) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256).T  # not contiguous
    values = to_float32(bits.view(item) if item is np.uint16 else bits.copy().view(item), dtype)
    is_number = ~np.isnan(values)
    narrowed = np.ascontiguousarray(from_float32(values, dtype)).view(np.uint16)
    np.testing.assert_array_equal(narrowed[is_number], bits[is_number])


def test_reads_a_tensor_at_an_unaligned_offset() -> None:
    values = np.arange(6, dtype=np.float16).reshape(2, 3)
    entry = TensorEntry("a", "F16", (2, 3), offset=3, num_bytes=12)
    read = read_tensor(io.BytesIO(b"xyz" + values.tobytes() + b"z"), entry)
    np.testing.assert_array_equal(read, values)


def test_a_file_that_shrank_is_refused() -> None:
    with pytest.raises(AdapterRejected, match="shrank"):
        read_tensor(io.BytesIO(bytes(11)), TensorEntry("a", "F32", (3,), offset=0, num_bytes=12))


def test_content_bytes_of_a_transposed_matrix_are_in_row_order() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert bytes(content_bytes(values.T)) == np.ascontiguousarray(values.T).tobytes()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 3, 7])
def test_refuses_values_that_are_not_finite(value: float, position: int) -> None:
    values = np.ones((2, 4), dtype=np.float32)
    values.flat[position] = value
    with pytest.raises(AdapterRejected) as caught:
        check_range(values, "x.lora_B.weight", scale=1.0, serving_dtype="float32")
    assert (caught.value.reason, caught.value.pointer) == ("non_finite_weights", "x.lora_B.weight")


def overflows(value: float, scale: float, serving_dtype: str) -> bool:
    try:
        values = np.array([[0.0, value]], dtype=np.float32)
        check_range(values, "a", scale=scale, serving_dtype=serving_dtype)
    except AdapterRejected as error:
        return error.reason == "weights_overflow"
    return False


LIMITS = [65504.0, 65519.996, 65520.0, 3.3895e38, 3.3961e38, 3.3962e38, 3.4e38]


@pytest.mark.parametrize("serving_dtype", TORCH_DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("value", LIMITS)
def test_finds_overflow_exactly_where_rounding_gives_infinity(
    value: float, sign: int, serving_dtype: str
) -> None:
    rounded = torch.tensor(sign * value, dtype=torch.float32).to(TORCH_DTYPES[serving_dtype])
    assert overflows(sign * value, 1.0, serving_dtype) == bool(rounded.isinf())


@given(
    value=st.floats(1, 2.0**127, width=32),
    scale=st.sampled_from([0.5, 1.0, 2.0, 31.6, 1e6]),
    serving_dtype=st.sampled_from(sorted(TORCH_DTYPES)),
)
def test_overflow_counts_the_scale(value: float, scale: float, serving_dtype: str) -> None:
    scaled = torch.tensor(value, dtype=torch.float32) * torch.tensor(scale, dtype=torch.float32)
    expected = bool(scaled.to(TORCH_DTYPES[serving_dtype]).isinf())
    assert overflows(value, scale, serving_dtype) == expected


@pytest.mark.parametrize(
    ("rank", "in_features", "out_features"), [(1, 1, 1), (4, 63, 133), (16, 8, 8)]
)
def test_delta_norm_is_that_of_the_product(
    rank: int, in_features: int, out_features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_GRAM_CHUNK_ELEMENTS", 100)  # several chunks
    generator = np.random.default_rng(0)
    a = generator.standard_normal((rank, in_features)).astype(np.float32)
    b = generator.standard_normal((out_features, rank)).astype(np.float32)
    expected = np.linalg.norm(0.5 * b.astype(np.float64) @ a.astype(np.float64))
    assert delta_norm(a, b, 0.5) == pytest.approx(expected, rel=1e-12)


def test_delta_norm_of_a_zero_matrix_is_zero() -> None:
    assert delta_norm(np.ones((2, 3), np.float32), np.zeros((5, 2), np.float32), 2.0) == 0.0


def test_delta_norm_of_the_largest_finite_values_is_finite() -> None:
    huge = np.full((2, 64), np.finfo(np.float32).max)
    assert math.isfinite(delta_norm(huge, huge.T.copy(), 1e6))
