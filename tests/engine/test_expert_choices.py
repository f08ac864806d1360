"""The self-test of a half type compares MoE layers at the same choices of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.engine.config import EngineConfig, KvDtype
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.model import group_self_test
from loraplex.engine.model.expert_choices import (
    ExpertChoices,
    ReplacedChoices,
    choosing,
    recording,
)
from loraplex.engine.model.expert_router import RouterProjection
from loraplex.engine.model.experts import ServedExperts
from loraplex.engine.model.parity_bound import SELF_TEST_TOLERANCE
from loraplex.engine.model.whole_base import load_base_model
from support.families import SERVED, save_family
from support.ranks import run_sharded

ONE_OF_FOUR = {**SERVED["mixtral"][1], "num_experts_per_tok": 1, "initializer_range": 0.1}
TOLERANCE = SELF_TEST_TOLERANCE[torch.bfloat16]


def load_dense(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path).eval()


def choices(experts: list[list[int]], weight: float) -> ExpertChoices:
    chosen = torch.tensor(experts)
    return ExpertChoices(chosen, torch.full(chosen.shape, weight))


def test_only_choices_of_another_set_of_experts_are_replaced() -> None:
    recorded = [
        {"layer": choices([[0, 1], [2, 3], [1, 2]], 1.0)},
        {"layer": choices([[3, 0]], 2.0)},
    ]
    replaced = ReplacedChoices(recorded)
    replaced.begin_step([(1, slice(0, 1)), (0, slice(1, 3))])
    chosen = replaced.choose("layer", choices([[3, 1], [3, 2], [1, 2]], 5.0))
    assert chosen.experts.tolist() == [[3, 0], [3, 2], [1, 2]]
    assert chosen.weights.tolist() == [[2.0, 2.0], [5.0, 5.0], [5.0, 5.0]]
    assert replaced.share == 1 / 3
    replaced.begin_step([(0, slice(0, 1))])
    replaced.choose("layer", choices([[0, 1]], 5.0))
    assert replaced.share == 1 / 4


def test_choices_are_recorded_and_given_by_layer_and_then_left_to_the_router(
    tmp_path: Path,
) -> None:
    model = load_dense(save_family(tmp_path, "mixtral", ONE_OF_FOUR))
    token_ids = torch.arange(12)[None]

    def logits() -> Tensor:
        with torch.inference_mode():
            computed: Tensor = model(input_ids=token_ids, use_cache=False).logits[0]
        return computed

    with recording(model) as recorded:
        own = logits()
    assert [path.split(".")[2] for path in recorded] == ["0", "1"]
    assert all(layer.experts.shape == layer.weights.shape == (12, 1) for layer in recorded.values())
    with choosing(model, lambda path, _: recorded[path]):
        assert torch.equal(logits(), own)
    turned = {
        path: ExpertChoices(layer.experts.flip(0), layer.weights)
        for path, layer in recorded.items()
    }
    with choosing(model, lambda path, _: turned[path]):
        assert (logits() - own).abs().max() > 0.05 * own.abs().max()
    assert torch.equal(logits(), own)


def save_with_near_ties(path: Path, other: int = 1) -> Path:
    """Expert 0 of each layer and another have scores that rounding to bf16 puts in either order."""
    model = load_dense(save_family(path, "mixtral", ONE_OF_FOUR))
    for layer in model.model.layers:
        router = layer.mlp.gate.weight.data
        router *= 10  # so that one of the two is chosen often
        noise = torch.randn(router[0].shape, generator=torch.Generator().manual_seed(0))
        router[other] = router[0] * (1 + 2**-9 * noise)
    model.save_pretrained(path)
    return path


def load_in_bf16(path: Path) -> float:
    base = load_base_model(EngineConfig(str(path), device="cpu", dtype="bfloat16"))
    return base.self_test_error


def test_a_base_whose_experts_nearly_tie_in_bf16_is_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_with_near_ties(tmp_path)
    shares = []
    share: Any = ReplacedChoices.share

    def watched(replaced: ReplacedChoices) -> Any:
        shares.append(share.fget(replaced))
        return shares[-1]

    monkeypatch.setattr(ReplacedChoices, "share", property(watched))
    assert 0 < load_in_bf16(path) < TOLERANCE
    assert 0 < max(shares) < 0.25
    monkeypatch.setattr(ReplacedChoices, "choose", lambda _self, _path, own: own)
    with pytest.raises(UnsupportedModel, match="differs from its own dense forward"):
        load_in_bf16(path)


def test_the_ranks_of_a_base_whose_experts_nearly_tie_in_bf16_compute_the_same_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone knows which choices the self-test replaces. Each rank has one of the experts."""
    path = save_with_near_ties(tmp_path, other=2)
    engine = EngineConfig(str(path), device="cpu", dtype="bfloat16")
    errors = run_sharded(engine, 2, lambda base, _rank: base.self_test_error)
    assert 0 < errors[0] < TOLERANCE
    monkeypatch.setattr(group_self_test, "of_first_rank", lambda _ranks: lambda _path, own: own)
    with pytest.raises(UnsupportedModel, match="differs from its own dense forward"):
        run_sharded(engine, 2, lambda _base, _rank: None)


def test_a_base_whose_router_chooses_other_experts_is_refused_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_family(tmp_path, "mixtral", ONE_OF_FOUR)
    forward = RouterProjection.forward

    def wrong(self: RouterProjection, *args: Any, **kwargs: Any) -> Any:
        *scores, experts = forward(self, *args, **kwargs)
        return (*scores, (experts + 1) % 4)

    monkeypatch.setattr(RouterProjection, "forward", wrong)
    with pytest.raises(UnsupportedModel, match="chooses other experts for 100% of the tokens"):
        load_in_bf16(path)


def test_a_base_whose_experts_compute_otherwise_is_refused_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_family(tmp_path, "mixtral", ONE_OF_FOUR)
    forward = ServedExperts.forward

    def wrong(self: ServedExperts, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return forward(self, hidden, (experts + 1) % 4, weights)

    monkeypatch.setattr(ServedExperts, "forward", wrong)
    with pytest.raises(UnsupportedModel, match="differs from its own dense forward"):
        load_in_bf16(path)


def test_the_error_of_a_quantized_cache_has_what_it_changes_in_the_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_family(tmp_path, "mixtral", ONE_OF_FOUR)
    config = EngineConfig(
        str(path), device="cpu", dtype="bfloat16", kv_dtype=KvDtype.INT2, max_model_len=256
    )
    told = load_base_model(config).kv_error
    monkeypatch.setattr(ReplacedChoices, "choose", lambda _self, _path, own: own)
    assert load_base_model(config).kv_error == told > 0.1
