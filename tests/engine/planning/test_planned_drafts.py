"""Draft models and heads are planned for as a start counts them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.errors import BaseNotFound, InvalidParameter, UnsupportedModel
from loraplex.engine.memory.kv_budget import MIB
from loraplex.engine.planning.load_needs import Load, LoadNeeds, LoadPlanner
from support.eagle import save_random_head
from support.engine import LocalEngine
from support.families import STATES, save_family
from support.medusa import save_untrained_heads
from support.models import make_tiny_llama

LOAD = Load(num_sequences=3, context=80, num_active=2, num_known=2, rank=4)


@pytest.fixture(scope="module")
def drafters(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafters")
    save_random_head(tiny_base, folder / "eagle")
    save_untrained_heads(tiny_base, folder / "medusa")
    return {"draft": tiny_base, "eagle": folder / "eagle", "medusa": folder / "medusa"}


def planned(base: Path, *speculation: str, device: str = "cpu", **settings: object) -> LoadNeeds:
    config = EngineConfig(str(base), device=device, speculation=speculation, **settings)  # type: ignore[arg-type]
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


def test_graphs_of_a_draft_model_have_all_of_its_layers_and_no_adapters(tmp_path: Path) -> None:
    base = make_tiny_llama(tmp_path / "base", num_hidden_layers=4)
    draft = make_tiny_llama(tmp_path / "draft", num_hidden_layers=1)

    def graph_bytes(*speculation: str) -> int:
        return planned(base, *speculation, device="cuda").graph_bytes

    added = graph_bytes(f"draft:{draft}") - graph_bytes("ngram")
    assert 0 < added < graph_bytes("ngram")
    # The layers of a self-draft are the base's.
    assert graph_bytes(f"draft:{draft}", "skip:2") == graph_bytes("skip:2") + added


def test_passes_of_an_eagle_head_have_graphs_on_cuda(
    drafters: dict[str, Path], tiny_base: Path
) -> None:
    eagle, plain = (
        planned(tiny_base, each, device="cuda").graph_bytes
        for each in (f"eagle:{drafters['eagle']}", "ngram")
    )
    assert eagle > plain


def test_a_draft_model_may_be_its_configuration_alone(
    drafters: dict[str, Path], tiny_base: Path, tmp_path: Path
) -> None:
    shutil.copy(tiny_base / "config.json", tmp_path)
    assert planned(tiny_base, f"draft:{tmp_path}") == planned(tiny_base, f"draft:{tiny_base}")


def test_a_draft_model_whose_states_cannot_be_taken_back_is_refused(
    tiny_base: Path, tmp_path: Path
) -> None:
    vocab_size = json.loads((tiny_base / "config.json").read_text())["vocab_size"]
    model_type, differences = STATES["mamba2"]
    draft = save_family(tmp_path, model_type, {**differences, "vocab_size": vocab_size})
    with pytest.raises(UnsupportedModel, match="cannot take back"):
        planned(tiny_base, f"draft:{draft}")


def test_a_head_that_reads_the_embedding_of_another_size_is_refused(
    drafters: dict[str, Path], tmp_path: Path
) -> None:
    wider = make_tiny_llama(tmp_path / "wider", hidden_size=128)
    with pytest.raises(InvalidParameter, match="is missing, and the base's has another size"):
        planned(wider, f"eagle:{drafters['eagle']}")


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
