"""Quantized experts and quantized latent attention of a divided base compute what one rank does."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loraplex.engine.checkpoint.weights import load_config, load_weights
from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.model import experts, group_self_test, sharded_base
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.expert_choices import (
    ExpertChoices,
    LayerChoices,
    ReplacedChoices,
    tell_choices,
)
from loraplex.engine.model.experts import experts_parameters
from loraplex.engine.model.load_quantization import LoadQuantization
from loraplex.engine.model.parity_bound import ROUNDED_INPUTS_TOLERANCE
from loraplex.engine.model.whole_experts import whole_experts
from loraplex.engine.shards.group_links import GroupLinks
from loraplex.engine.shards.rank_place import GroupShape
from loraplex.engine.shards.stage_links import StageLinks
from loraplex.kernels.expert_packing import pack_experts
from loraplex.kernels.packed_experts import PackedExperts
from loraplex.kernels.quantize import WeightFormat
from loraplex.kernels.quantized_weight import QuantizedWeight
from support.divided_experts import EXPERTS, expert_cases
from support.divided_formats import compare
from support.families import SERVED, save_family
from support.features import change_weights, dense_logits, load_plain
from support.marks import PEFT_PATTERNS, marked_slow
from support.quantized import rounded_weight
from support.quantized_checkpoints import FORMATS, write_checkpoint
from support.ranks import loading_in_threads, run_group, run_sharded

pytestmark = PEFT_PATTERNS
TENSOR = (GroupShape(2, 1), GroupShape(4, 1))
STAGES = (GroupShape(1, 2), GroupShape(2, 2))
STAGED = (
    "qwen3_moe: gptq",
    "qwen3_moe: --quantize int4",
    "qwen3_moe: --quantize nf4",
    "gpt_oss-sinks-window: mxfp4",
    "deepseek_v3-lora: deepseek-fp8",
)
QUICK = {("qwen3_moe: --quantize int4", TENSOR[0])}
CASES = sorted(QUICK.union(zip(list(expert_cases())[::6], cycle(TENSOR))))
CASES += zip(STAGED, cycle(STAGES))
"""`make parallel-evidence` tries all formats with 2 and 4 ranks."""
TOKENS = [3, 17, 5, 90, 4]


@pytest.mark.parametrize(
    "case", marked_slow(CASES, slow=set(CASES) - QUICK), ids=lambda case: f"{case[0]}-{case[1]}"
)
def test_a_mixed_batch_of_a_format_equals_one_rank(
    case: tuple[str, GroupShape], tmp_path: Path
) -> None:
    name, (size, num_stages) = case
    if "gguf" in name:
        pytest.importorskip("gguf")
    found = compare(expert_cases()[name], size, tmp_path, num_stages=num_stages)
    assert found.is_within, found


def test_a_rank_quantizes_and_holds_only_its_own_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied: Counter[tuple[int, str]] = Counter()
    own = LoadQuantization.apply

    def counted(
        self: LoadQuantization, path: str, values: Tensor | QuantizedWeight
    ) -> Tensor | QuantizedWeight:
        applied[threading.get_ident(), path] += 1
        return own(self, path, values)

    monkeypatch.setattr(LoadQuantization, "apply", counted)
    model = save_family(tmp_path / "base", *SERVED[EXPERTS])
    engine = EngineConfig(str(model), device="cpu", quantization=Quantization.NF4)

    def held(base: BaseModel, _rank: int) -> tuple[int, list[int]]:
        return threading.get_ident(), [part.num_experts for part in base.packed_experts]

    _, (thread, num_experts) = run_sharded(engine, 2, held)
    assert num_experts == [2, 2, 2, 2], "half of the experts of two layers with two matrices each"
    counts = [
        count for (owner, path), count in applied.items() if owner == thread and ".experts." in path
    ]
    assert counts == [2, 2, 2, 2]


def test_the_reference_of_the_self_test_has_the_values_of_the_experts_codes(
    tmp_path: Path,
) -> None:
    path = save_family(tmp_path / "base", *SERVED[EXPERTS])
    model = load_weights(
        path,
        load_config(path),
        torch.float32,
        torch.device("cpu"),
        left_experts=lambda model: experts_parameters(model),
    )
    before = dense_logits(model, TOKENS)
    with whole_experts(model, LoadQuantization(WeightFormat.INT4)):
        found = dense_logits(model, TOKENS)
    assert torch.equal(dense_logits(model, TOKENS), before)

    def round_experts(name: str, parameter: Tensor) -> None:
        if ".experts." in name:
            for matrix in parameter:
                matrix.copy_(rounded_weight(matrix, WeightFormat.INT4))

    change_weights(path, round_experts)
    assert (found - dense_logits(load_plain(path), TOKENS)).abs().max() < 1e-4
    assert (found - before).abs().max() > 0.01


@pytest.mark.parametrize("form", marked_slow(["int4", "nf4"], slow=["nf4"]))
def test_wrong_experts_are_refused_by_the_self_test(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of rounding is far below the error of inputs in another order."""

    def pack_turned(
        matrices: Iterable[QuantizedWeight], num_experts: int, *, device_type: str
    ) -> PackedExperts | None:
        turned = (replace(each, codes=each.codes.roll(1, dims=1)) for each in matrices)
        return pack_experts(turned, num_experts, device_type=device_type)

    monkeypatch.setattr(experts, "pack_experts", pack_turned)
    model = save_family(tmp_path / "base", *SERVED[EXPERTS])
    engine = EngineConfig(
        str(model), device="cpu", dtype="float32", quantization=Quantization(form)
    )
    with pytest.raises(UnsupportedModel, match="paged forward differs"):
        run_sharded(engine, 2, lambda _base, _rank: None)


@pytest.mark.slow
def test_ranks_whose_experts_round_differently_have_one_bound(tmp_path: Path) -> None:
    """The experts of rank 0 become dense, because one of them is in its file; those of rank 1
    round their inputs."""
    dense = save_family(tmp_path / "dense", *SERVED[EXPERTS])
    model = write_checkpoint(
        dense, tmp_path / "packed", FORMATS["gptq"], but=("self_attn", "experts.0.")
    )
    engine = EngineConfig(str(model), device="cpu", dtype="float32")

    def held(base: BaseModel, _rank: int) -> tuple[int, float]:
        return len(base.packed_experts), base.self_test_bound

    assert run_sharded(engine, 2, held) == [
        (0, ROUNDED_INPUTS_TOLERANCE),
        (4, ROUNDED_INPUTS_TOLERANCE),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("shape", STAGES, ids=str)
def test_experts_of_stages_are_served_in_bf16(shape: GroupShape, tmp_path: Path) -> None:
    """Each stage has the choices of experts of the dense forward pass."""
    model = save_family(tmp_path / "base", *SERVED[EXPERTS])
    engine = EngineConfig(
        str(model), device="cpu", dtype="bfloat16", quantization=Quantization.INT4
    )
    size, num_stages = shape
    (error, bound), *_ = run_sharded(
        engine,
        size,
        lambda base, _: (base.self_test_error, base.self_test_bound),
        num_stages=num_stages,
    )
    assert 0 < error < bound == pytest.approx(0.05)


def test_a_stage_that_chooses_other_experts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell_others(recorded: Sequence[LayerChoices], links: StageLinks) -> list[LayerChoices]:
        return [
            {
                path: ExpertChoices((choices.experts + 1) % 4, choices.weights)
                for path, choices in of_layers.items()
            }
            for of_layers in tell_choices(recorded, links)
        ]

    monkeypatch.setattr(group_self_test, "tell_choices", tell_others)
    model = save_family(tmp_path / "base", *SERVED[EXPERTS])
    engine = EngineConfig(str(model), device="cpu", quantization=Quantization.INT4)

    def load(links: GroupLinks, _rank: int) -> str:
        with pytest.raises(UnsupportedModel) as caught:
            sharded_base.load_sharded_base(engine, links)
        return str(caught.value)

    with loading_in_threads():
        for reason in run_group(GroupShape(1, 2), load):
            assert "its paged forward chooses other experts for" in reason


def test_every_rank_of_every_stage_is_told_the_choices_of_rank_0() -> None:
    experts_of = torch.tensor([[1, 0], [2, 3]])
    weights = torch.tensor([[0.75, 0.25], [0.1, 0.3]])
    layers = {"model.layers.0.mlp.experts": ExpertChoices(experts_of, weights)}

    def tell(links: GroupLinks, rank: int) -> list[LayerChoices]:
        assert links.stages
        return tell_choices([layers] if rank == 0 else [], links.stages)

    for (told,) in run_group(GroupShape(1, 2), tell):
        ((path, choices),) = told.items()
        assert path == "model.layers.0.mlp.experts"
        assert torch.equal(choices.experts, experts_of)
        assert torch.equal(choices.weights, weights)


def test_replaced_choices_have_the_dtypes_of_the_routers_own() -> None:
    recorded = ExpertChoices(torch.tensor([[1, 0]]), torch.tensor([[0.75, 0.25]]))
    replaced = ReplacedChoices([{"experts": recorded}])
    replaced.begin_step([(0, slice(0, 1))])
    own = ExpertChoices(torch.tensor([[2, 3]]), torch.tensor([[0.5, 0.5]], dtype=torch.bfloat16))
    found = replaced.choose("experts", own)
    assert found.experts.tolist() == [[1, 0]]
    assert found.weights.dtype is torch.bfloat16
