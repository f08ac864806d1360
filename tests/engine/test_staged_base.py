"""A base whose layers are divided among stages computes what one rank and PEFT compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.shards.rank_place import GroupShape
from support.divided import divided_errors
from support.families import SERVED, STATES, save_family
from support.marks import PEFT_PATTERNS, marked_slow
from support.peft_parity import TOLERANCE
from support.ranks import run_sharded

pytestmark = PEFT_PATTERNS
CASES = {**SERVED, **STATES}
FAMILIES = ["llama", "falcon", "mixtral", *list(CASES)[::16]]
STAGED = [(family, GroupShape(1, 2)) for family in dict.fromkeys(FAMILIES)]
STAGED += [
    (family, GroupShape(2, 2))
    for family in ("llama", "gemma2-softcap-window", "phi3-fused", "qwen3_moe", "deepseek_v2-mla")
]
"""`make parallel-evidence` tries all families."""
QUICK = {("llama", GroupShape(1, 2)), ("falcon", GroupShape(1, 2)), ("llama", GroupShape(2, 2))}


@pytest.mark.parametrize(
    "case", marked_slow(STAGED, slow=set(STAGED) - QUICK), ids=lambda case: f"{case[0]}-{case[1]}"
)
def test_a_mixed_batch_equals_one_rank_and_peft(
    case: tuple[str, GroupShape], tmp_path: Path
) -> None:
    """Falcon's layers return more than their hidden states."""
    family, (size, num_stages) = case
    model = save_family(tmp_path / "base", *CASES[family])
    assert max(divided_errors(model, size, tmp_path, num_stages=num_stages)) < TOLERANCE


def test_each_stage_holds_its_own_weights_and_ends(tmp_path: Path) -> None:
    model = save_family(tmp_path / "base", *SERVED["llama"])
    engine = EngineConfig(str(model), device="cpu", dtype="float32")
    (whole,) = run_sharded(engine, 1, lambda base, _rank: base.weight_bytes)

    def held(base: BaseModel, _rank: int) -> tuple[int, bool, bool]:
        return base.weight_bytes, base.ends.embedding is not None, base.ends.head is not None

    last, first = run_sharded(engine, 1, held, num_stages=2)
    assert first[1:] == (True, False)
    assert last[1:] == (False, True)
    norm = 64 * 4
    assert first[0] + last[0] == whole + norm, "the last norm, of which both have a copy"


def test_a_base_with_fewer_layers_than_stages_is_refused(tmp_path: Path) -> None:
    model = save_family(tmp_path / "base", *SERVED["llama"])
    engine = EngineConfig(str(model), device="cpu", dtype="float32")
    with pytest.raises(UnsupportedModel, match="2 layers cannot be divided among 3 stages"):
        run_sharded(engine, 1, lambda _base, _rank: None, num_stages=3)


def test_a_base_whose_layers_read_the_embeddings_again_is_refused_before_it_is_divided(
    tmp_path: Path,
) -> None:
    model = save_family(tmp_path / "base", *STATES["zamba2"])
    engine = EngineConfig(str(model), device="cpu", dtype="float32")
    with pytest.raises(UnsupportedModel, match="zamba2 cannot be divided among stages"):
        run_sharded(engine, 1, lambda _base, _rank: None, num_stages=2)
