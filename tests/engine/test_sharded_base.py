"""A base that is divided among ranks computes what one rank and PEFT compute."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.divided_ends import DividedEmbedding
from loraplex.engine.model.whole_base import load_base_model
from support.divided import divided_errors
from support.families import SERVED, STATES, save_family
from support.marks import PEFT_PATTERNS, marked_slow
from support.parallel_table import parallel_table
from support.peft_parity import TOLERANCE
from support.ranks import run_sharded

pytestmark = PEFT_PATTERNS
CASES = {**SERVED, **STATES}
REFUSED = ("jetmoe", "falcon_mamba", "mamba", "mamba2", "zamba2")
FAMILIES = [case for case in CASES if case not in REFUSED]
QUICK = {("llama", 2), ("llama", 4), ("phi3-fused", 2), ("gemma2-softcap-window", 2)}
DIVIDED = sorted(QUICK.union(zip(FAMILIES[::8], cycle((2, 4)))))
"""Four ranks share two KV heads, if a family has so few, and have an expert of a layer each.
`make parallel-evidence` tries all families with 2 and 4 ranks."""


@pytest.mark.parametrize(
    "case", marked_slow(DIVIDED, slow=set(DIVIDED) - QUICK), ids=lambda case: f"{case[0]}-{case[1]}"
)
def test_a_mixed_batch_equals_one_rank_and_peft(case: tuple[str, int], tmp_path: Path) -> None:
    family, size = case
    model = save_family(tmp_path / "base", *CASES[family])
    errors = divided_errors(model, size, tmp_path)
    assert max(errors) < TOLERANCE


def test_the_attention_of_llama_4_is_divided_although_its_class_names_another_decoder(
    tmp_path: Path,
) -> None:
    model = save_family(tmp_path / "base", *SERVED["llama4-chunks"])
    engine = EngineConfig(str(model), device="cpu", dtype="float32")

    def outputs(base: BaseModel, _rank: int) -> list[int]:
        slices = [part for fused in base.projections for part in fused.projection.slices]
        return [part.out_features for part in slices if part.name.endswith("q_proj")]

    assert run_sharded(engine, 2, outputs) == [[32] * 4, [32] * 4]


@pytest.mark.parametrize("family", marked_slow(REFUSED, slow=REFUSED[1:]))
def test_a_base_of_which_nothing_can_be_divided_is_refused_by_name(
    family: str, tmp_path: Path
) -> None:
    model = save_family(tmp_path / "base", *CASES[family])
    engine = EngineConfig(str(model), device="cpu", dtype="float32")
    with pytest.raises(UnsupportedModel, match="has no plan"):
        run_sharded(engine, 2, lambda _base, _rank: None)


def test_a_base_whose_heads_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    settings = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}
    model = save_family(tmp_path / "base", "llama", settings)
    engine = EngineConfig(str(model), device="cpu", dtype="float32")
    with pytest.raises(UnsupportedModel, match="3 heads, which cannot be divided among 2 ranks"):
        run_sharded(engine, 2, lambda _base, _rank: None)


def test_a_base_whose_experts_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    kind, settings = SERVED["mixtral"]
    model = save_family(
        tmp_path / "base", kind, {**settings, "num_experts": 3, "num_local_experts": 3}
    )
    engine = EngineConfig(str(model), device="cpu", dtype="float32")
    with pytest.raises(UnsupportedModel, match="3 experts, which cannot be divided among 2 ranks"):
        run_sharded(engine, 2, lambda _base, _rank: None)


def test_a_rank_holds_its_experts_and_sinks_and_no_others(tmp_path: Path) -> None:
    """Two of four experts with their biases, and the sinks of two of four heads."""
    model = save_family(tmp_path / "base", *SERVED["gpt_oss-sinks-window"])
    engine = EngineConfig(
        str(model),
        device="cpu",
        dtype="float32",
        tensor_parallel_size=2,
        enable_expert_parallel=True,
    )
    whole = AutoModelForCausalLM.from_pretrained(model).state_dict()

    def is_divided(name: str) -> bool:
        return ".experts." in name or name.endswith(".sinks")

    def check(base: BaseModel, rank: int) -> int:
        held = {n: p for n, p in base.model.named_parameters() if is_divided(n)}
        for name, parameter in held.items():
            assert torch.equal(parameter, whole[name][2 * rank : 2 * rank + 2])
        return len(held)

    assert run_sharded(engine, 2, check) == [sum(map(is_divided, whole))] * 2


def test_a_rank_holds_its_part_of_every_divided_weight(tmp_path: Path) -> None:
    model = save_family(tmp_path / "base", *SERVED["llama"])
    engine = EngineConfig(str(model), device="cpu", dtype="float32")
    whole = sum(fused.linear.weight_bytes for fused in load_base_model(engine).projections)
    of_ranks = run_sharded(
        engine, 2, lambda base, _: sum(fused.linear.weight_bytes for fused in base.projections)
    )
    assert of_ranks == [whole / 2] * 2


@pytest.mark.parametrize("kind", ["llama", "gemma"])  # the ends of gemma are tied
def test_a_rank_holds_the_rows_of_its_tokens_and_no_others(kind: str, tmp_path: Path) -> None:
    model = save_family(tmp_path / "base", kind, {"vocab_size": 100})
    engine = EngineConfig(str(model), device="cpu", dtype="float32")
    whole = AutoModelForCausalLM.from_pretrained(model)
    table, head = whole.get_input_embeddings().weight, whole.get_output_embeddings().weight
    parts = [slice(0, 32), slice(32, 64), slice(64, 96), slice(96, 100)]

    def check(base: BaseModel, rank: int) -> None:
        own = base.model.get_input_embeddings()
        assert isinstance(own, DividedEmbedding)
        assert torch.equal(own.weight, table[parts[rank]])
        x = torch.randn(3, head.shape[1], generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            logits = base.model.get_output_embeddings()(x)
        of_tokens = slice(None) if rank == 0 else parts[rank]
        assert (logits - x @ head[of_tokens].T).abs().max() < 1e-5

    run_sharded(engine, 4, check)


def test_ends_of_few_tokens_are_whole_on_every_rank(tmp_path: Path) -> None:
    model = save_family(tmp_path / "base", "llama", {"vocab_size": 48})
    engine = EngineConfig(str(model), device="cpu", dtype="float32")
    of_ranks = run_sharded(
        engine, 4, lambda base, _: base.model.get_input_embeddings().weight.shape[0]
    )
    assert of_ranks == [48] * 4


@pytest.mark.parametrize("kind", marked_slow(["llama", "gemma"], slow=["llama"]))
def test_a_rank_holds_its_tokens_of_quantized_ends(kind: str, tmp_path: Path) -> None:
    model = save_family(tmp_path / "base", kind, {"vocab_size": 100})
    engine = EngineConfig(
        str(model), device="cpu", dtype="float32", embedding_quantization=Quantization.INT8
    )

    def sizes(base: BaseModel, _rank: int) -> list[int]:
        return [linear.out_features for linear in base.packed_ends.linears]

    num_weights = 1 if kind == "gemma" else 2
    expected = [[size] * num_weights for size in (64, 36)]
    assert run_sharded(engine, 2, sizes) == expected


def test_the_documented_types_are_those_that_are_tested() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
    assert parallel_table(FAMILIES) in page
