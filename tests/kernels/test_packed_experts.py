"""Quantized experts, compared with the dequantized matrix of each pair's expert."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor

from loraplex.kernels.expert_packing import empty_experts, pack_experts
from loraplex.kernels.expert_pairs import ExpertPairs, plain_sort_pairs
from loraplex.kernels.grouped_linear import grouped_linear
from loraplex.kernels.packed_experts import DequantizedExperts, PackedExperts
from loraplex.kernels.packed_experts_cpu import PanelExperts
from loraplex.kernels.quantize import WeightFormat, quantize
from loraplex.kernels.quantized_weight import CodeType, QuantizedWeight
from loraplex.kernels.wna16_experts import WNA16Experts
from support.cpu_kernels import needs_cpu_library
from support.marks import marked_slow
from support.quantized_weights import CASES, Case, inputs_of_15_bits, make_weight

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"  # Triton 3.6's interpreter
)
NUM_EXPERTS = 5
Pack = Callable[[list[QuantizedWeight]], PackedExperts]
KINDS = {
    "library": PanelExperts,
    "dequantized": DequantizedExperts,
    "triton": WNA16Experts,
}


def pack_as(kind: type[PackedExperts], matrices: list[QuantizedWeight]) -> PackedExperts:
    packed = kind(len(matrices), matrices[0])
    assert all(packed.put(index, matrix) for index, matrix in enumerate(matrices))
    return packed


@pytest.fixture(params=[pytest.param("library", marks=needs_cpu_library), "dequantized", "triton"])
def pack(request: pytest.FixtureRequest) -> Pack:
    """By the implementation of a device; the GPU's kernels in the interpreter."""
    if request.param == "triton":
        request.getfixturevalue("interpreted_expert_codes")
    return partial(pack_as, KINDS[request.param])


EACH_CASE = pytest.mark.parametrize("case", CASES, ids=str)


def make_matrices(case: Case) -> list[QuantizedWeight]:
    """Each with an order of its own, if they have one."""
    return [make_weight(case, seed) for seed in range(NUM_EXPERTS)]


def make_pairs(num_tokens: int, *, is_tiled: bool = True) -> ExpertPairs:
    """Of random experts, of which the last is never chosen."""
    rng = random.Random(num_tokens)
    return pairs_of(
        [rng.sample(range(NUM_EXPERTS - 1), 2) for _ in range(num_tokens)], is_tiled=is_tiled
    )


def pairs_of(chosen: list[list[int]], *, is_tiled: bool = True) -> ExpertPairs:
    """Of the experts that each token chose; the CPU ignores tiles."""
    top_k_index = torch.tensor(chosen, dtype=torch.int64).view(len(chosen), -1 if chosen else 1)
    return plain_sort_pairs(top_k_index, NUM_EXPERTS, is_tiled=is_tiled)


def expected(x: Tensor, matrices: list[QuantizedWeight], pairs: ExpertPairs) -> Tensor:
    values = torch.stack([matrix.dequantize() for matrix in matrices]).double()
    return torch.einsum("pi,poi->po", x.double(), values[pairs.experts])


def assert_close(ours: Tensor, theirs: Tensor, *, bound: float = 1e-5) -> None:
    assert ours.shape == theirs.shape
    assert (ours.double() - theirs).abs().max() <= bound * theirs.abs().max()


@EACH_CASE
@pytest.mark.parametrize("num_tokens", [1, 30])
@pytest.mark.parametrize(
    "kind", [pytest.param(PanelExperts, marks=needs_cpu_library), DequantizedExperts]
)
def test_each_pair_meets_the_values_of_its_expert(
    kind: type[PackedExperts], case: Case, num_tokens: int
) -> None:
    matrices, pairs = make_matrices(case), make_pairs(num_tokens)
    x = inputs_of_15_bits(pairs.num_pairs, case.shape[1])
    assert_close(grouped_linear(x, pack_as(kind, matrices), pairs), expected(x, matrices, pairs))


@pytest.mark.parametrize("case", marked_slow(CASES, slow=CASES[:13]), ids=str)
def test_the_triton_kernel_gives_each_pair_the_values_of_its_expert(
    interpreted_expert_codes: ModuleType, case: Case
) -> None:
    matrices, pairs = make_matrices(case), make_pairs(20)
    experts = pack_as(WNA16Experts, matrices)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        x = torch.randn(pairs.num_pairs, case.shape[1]).to(dtype)
        y = grouped_linear(x, experts, pairs)
        assert y.dtype == dtype
        assert_close(y, expected(x, matrices, pairs), bound=bound)


def test_one_expert_may_get_all_pairs_or_none_at_all(pack: Pack) -> None:
    matrices = make_matrices(CASES[5])
    experts = pack(matrices)
    for chosen in ([[3]] * 40, []):
        pairs = pairs_of(chosen)
        x = inputs_of_15_bits(pairs.num_pairs, experts.in_features)
        y = grouped_linear(x, experts, pairs)
        torch.testing.assert_close(
            y.double(), expected(x, matrices, pairs), rtol=1e-5, atol=1e-5, check_stride=False
        )


def test_biases_are_added_to_the_rounded_product(pack: Pack) -> None:
    matrices, pairs = make_matrices(CASES[6]), make_pairs(9)
    experts = pack(matrices)
    x = torch.randn(pairs.num_pairs, experts.in_features).bfloat16()
    bias = torch.randn(NUM_EXPERTS, experts.out_features).bfloat16()
    plain = grouped_linear(x, experts, pairs)
    assert plain.dtype == torch.bfloat16
    assert torch.equal(grouped_linear(x, experts, pairs, bias=bias), plain + bias[pairs.experts])
    assert_close(plain, expected(x, matrices, pairs), bound=1e-2)


def test_experts_may_lack_zero_points_and_orders_that_others_have(pack: Pack) -> None:
    case = Case(CodeType.INT4, 32, torch.float16, torch.int8, has_order=True, shape=(33, 96))
    matrices = make_matrices(case)
    matrices[0] = replace(matrices[0], zero=None)
    matrices[2] = replace(matrices[2], zero=None, order=None)
    matrices[3] = replace(matrices[3], order=None)
    pairs = make_pairs(30)
    x = inputs_of_15_bits(pairs.num_pairs, 96)
    assert_close(grouped_linear(x, pack(matrices), pairs), expected(x, matrices, pairs))


def test_no_other_pair_changes_a_bit_of_a_pairs_result(pack: Pack) -> None:
    experts, pairs = pack(make_matrices(CASES[14])), make_pairs(30)
    x = torch.randn(pairs.num_pairs, experts.in_features)
    together = grouped_linear(x, experts, pairs)
    x[3] = torch.nan
    dirty = grouped_linear(x, experts, pairs)
    others = torch.arange(pairs.num_pairs) != 3
    assert torch.equal(dirty[others], together[others])
    assert dirty[3].isnan().all()


@needs_cpu_library
def test_a_pair_alone_has_the_bits_that_it_has_among_others() -> None:
    experts, pairs = pack_as(PanelExperts, make_matrices(CASES[1])), make_pairs(30)
    x = torch.randn(pairs.num_pairs, experts.in_features)
    together = grouped_linear(x, experts, pairs)
    for place, expert in enumerate(pairs.experts.tolist()):
        alone = grouped_linear(x[place : place + 1], experts, pairs_of([[expert]]))
        assert torch.equal(alone[0], together[place])


def test_prompts_on_a_gpu_dequantize_one_expert_after_another(
    interpreted_expert_codes: ModuleType,
) -> None:
    for case in (CASES[3], CASES[14]):
        matrices, pairs = make_matrices(case), make_pairs(30, is_tiled=False)
        x = torch.randn(pairs.num_pairs, case.shape[1])
        experts = pack_as(WNA16Experts, matrices)
        assert_close(grouped_linear(x, experts, pairs), expected(x, matrices, pairs))


def test_pairs_with_tiles_are_multiplied_without_a_value_that_the_host_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A captured step waits for nothing: tensors on the meta device have no values."""
    meta = torch.device("meta")
    tiled = ModuleType("wna16_experts_triton")
    tiled.multiply_quantized_tiles = (  # type: ignore[attr-defined]
        lambda x, first, _tiles: x.new_empty(len(x), first.out_features)
    )
    monkeypatch.setitem(sys.modules, "loraplex.kernels.wna16_experts_triton", tiled)
    matrices = [matrix.to(meta) for matrix in make_matrices(CASES[7])]
    experts = pack_as(WNA16Experts, matrices)
    top_k_index = torch.zeros(9, 2, dtype=torch.int64, device=meta)
    pairs = plain_sort_pairs(top_k_index, NUM_EXPERTS, is_tiled=True)
    bias = torch.zeros(NUM_EXPERTS, experts.out_features, device=meta)
    x = torch.zeros(pairs.num_pairs, experts.in_features, device=meta)
    y = grouped_linear(x, experts, pairs, bias=bias)
    assert y.shape == (18, experts.out_features)


@EACH_CASE
def test_experts_take_the_bytes_of_their_codes_and_scales(case: Case) -> None:
    matrices = make_matrices(case)
    packed = pack_as(PanelExperts, matrices)
    (rows, columns), groups = case.shape, -(-case.shape[1] // case.group)
    padded = -(-rows // 16) * 16
    zero_bytes = 0 if case.zero_dtype is None else case.zero_dtype.itemsize
    of_each = padded * 2 * -(-columns * case.code_type.bits // 16)
    of_each += padded * groups * (case.scale_dtype.itemsize + zero_bytes)
    of_each += 8 * columns if case.has_order else 0
    table = 64 if case.code_type is CodeType.TABLE4 else 0
    assert packed.weight_bytes == NUM_EXPERTS * of_each + table


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@EACH_CASE
def test_experts_without_values_take_the_same_bytes(case: Case, device_type: str) -> None:
    meta = torch.device("meta")
    matrices = make_matrices(case)
    empty = empty_experts(matrices[0].to(meta), NUM_EXPERTS, device_type=device_type)
    filled = pack_experts(matrices, NUM_EXPERTS, device_type=device_type)
    if device_type == "cuda" and case.group < 16:
        assert empty is filled is None
        return
    assert empty is not None
    assert filled is not None
    assert empty.weight_bytes == filled.weight_bytes
    assert empty.shape == filled.shape == (NUM_EXPERTS, *case.shape)


def test_matrices_of_several_forms_are_not_packed() -> None:
    first, second = make_matrices(CASES[6])[:2]
    others: list[Tensor | QuantizedWeight] = [
        make_weight(CASES[8]),
        make_weight(CASES[0]),
        replace(second, scale=second.scale.float()),
        second.dequantize(),
    ]
    for other in others:
        assert pack_experts([first, other], 2, device_type="cpu") is None
        assert pack_experts([other, first], 2, device_type="cpu") is None
    tables = make_matrices(CASES[9])[:2]
    assert tables[1].table is not None
    tables[1] = replace(tables[1], table=tables[1].table.flip(0))
    assert pack_experts(tables, 2, device_type="cpu") is None


@pytest.mark.parametrize("group_size", [None, 48])
@pytest.mark.parametrize("form", WeightFormat)
def test_every_format_of_floats_is_multiplied(form: WeightFormat, group_size: int | None) -> None:
    matrices = [quantize(matrix, form, group_size) for matrix in torch.randn(NUM_EXPERTS, 24, 160)]
    packed = pack_experts(matrices, NUM_EXPERTS, device_type="cpu")
    assert packed is not None
    pairs = make_pairs(7)
    x = inputs_of_15_bits(pairs.num_pairs, 160)
    assert_close(grouped_linear(x, packed, pairs), expected(x, matrices, pairs))
