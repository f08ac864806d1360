"""Draft models and heads are planned for as a start counts them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.errors import BaseNotFound, InvalidParameter, UnsupportedModel
from loraplex.engine.memory.kv_budget import MIB
from loraplex.engine.planning.load_needs import Load, LoadNeeds, LoadPlanner
from support.eagle import save_random_head
from support.engine import LocalEngine
from support.medusa import save_untrained_heads
from support.models import make_tiny_llama

LOAD = Load(num_sequences=3, context=80, num_active=2, num_known=2, rank=4)


@pytest.fixture(scope="module")
def drafters(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafters")
    save_random_head(tiny_base, folder / "eagle")
    save_untrained_heads(tiny_base, folder / "medusa")
    return {"draft": tiny_base, "eagle": folder / "eagle", "medusa": folder / "medusa"}


def planned(base: Path, *speculation: str, **settings: object) -> LoadNeeds:
    config = EngineConfig(str(base), device="cpu", speculation=speculation, **settings)  # type: ignore[arg-type]
    return LoadPlanner(config).needs(LOAD)


@pytest.mark.parametrize(
    ("names", "quantization"),
    [
        (("draft", "eagle"), Quantization.NONE),
        (("eagle", "medusa"), Quantization.INT8),
    ],
    ids=str,
)
def test_a_started_engine_counts_what_was_planned_for_its_drafts(
    names: tuple[str, ...],
    quantization: Quantization,
    drafters: dict[str, Path],
    tiny_base: Path,
    tmp_path: Path,
) -> None:
    speculation = tuple(f"{name}:{drafters[name]}" for name in names)
    needs = planned(tiny_base, *speculation, quantization=quantization)
    engine = LocalEngine(
        tiny_base,
        tmp_path,
        speculation=speculation,
        quantization=quantization,
        max_num_seqs=LOAD.num_sequences,
        max_model_len=LOAD.context,
        kv_cache_bytes=needs.kv_bytes,
        arena_bytes=needs.arena_bytes,
        host_cache_bytes=needs.host_cache_bytes,
    )
    lines = "\n".join(engine.core.info.memory_plan)
    engine.close()
    weights = re.findall(r"(?:draft model|EAGLE head|Medusa heads) ([\d.]+) MiB", lines)
    caches = re.findall(r"its KV cache (\d+) blocks of \d+ tokens, (\d+) bytes each", lines)
    assert len(weights) == 2
    assert sum(map(float, weights)) == pytest.approx(needs.draft_weight_bytes / MIB, abs=0.11)
    assert sum(int(count) * int(size) for count, size in caches) == needs.draft_kv_bytes > 0


def test_the_device_holds_drafts_besides_the_load(
    drafters: dict[str, Path], tiny_base: Path
) -> None:
    alone, drafting = planned(tiny_base), planned(tiny_base, f"draft:{drafters['draft']}")
    assert drafting.draft_weight_bytes == alone.weight_bytes
    assert drafting.draft_kv_bytes == alone.kv_bytes
    added = drafting.device_bytes - alone.device_bytes
    assert added >= drafting.draft_weight_bytes + drafting.draft_kv_bytes


def test_ranks_leave_the_draft_model_whole(drafters: dict[str, Path], tiny_base: Path) -> None:
    draft = f"draft:{drafters['draft']}"
    alone, divided = planned(tiny_base, draft), planned(tiny_base, draft, tensor_parallel_size=2)
    assert divided.draft_weight_bytes == alone.draft_weight_bytes
    assert divided.weight_bytes < alone.weight_bytes


@pytest.mark.parametrize("name", ["draft", "eagle", "medusa"])
def test_drafters_of_another_vocabulary_are_refused(
    name: str, drafters: dict[str, Path], tmp_path: Path
) -> None:
    other = make_tiny_llama(tmp_path / "other", vocab_size=192)
    with pytest.raises((InvalidParameter, UnsupportedModel), match="vocab"):
        planned(other, f"{name}:{drafters[name]}")


def test_a_folder_without_a_checkpoint_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(BaseNotFound, match=str(tmp_path)):
        planned(tiny_base, f"eagle:{tmp_path}")
