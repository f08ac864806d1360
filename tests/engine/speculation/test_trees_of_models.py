"""Trees of models that draft, whatever they are: the output of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loraplex.engine.config import Acceptance, EngineConfig, KvDtype
from loraplex.engine.draft import Draft
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.messages import SpeculationParams
from loraplex.engine.speculation.proposer import DraftRequest
from loraplex.engine.speculation.self_draft_tree import SelfDraftTreeProposer
from support.engine import LocalEngine
from support.families import SERVED, VOCAB_SIZE, save_family
from support.marks import marked_slow
from support.models import make_adapter, make_tiny_llama
from support.mtp import save_shipping

NUM_TOKENS = 16
FAMILIES = ("mistral-window", "gemma2-softcap-window", "gpt_oss-sinks-window", "llama4-chunks")
"""Those of which a query sees a part of the tokens before it."""


def answers(
    base: Path, directory: Path, folder: Path | None, *speculation: str, **config: Any
) -> tuple[list[list[int]], int]:
    """The tokens of a batch, greedy and sampled, of base and adapter, with trees of one to eight
    nodes; how many of them were drafted."""
    engine = LocalEngine(base, directory, speculation=speculation, **config)
    keys = [None] if folder is None else [None, engine.add_adapter(folder)]
    rng = random.Random(1)
    for index in range(8):
        engine.submit(
            [rng.randrange(3, VOCAB_SIZE) for _ in range(1 + 5 * index)],
            keys[index // 2 % len(keys)],
            max_tokens=NUM_TOKENS,
            temperature=0.0 if index % 2 else 0.7,
            seed=index,
            ignore_eos=True,
            speculation=SpeculationParams(num_tokens=1 + index),
        )
    engine.run()
    engine.close()
    ends = [answer.end for answer in engine.answers.values()]
    assert not [end.error for end in ends if end.error]
    tokens = [answer.token_ids for answer in engine.answers.values()]
    return tokens, sum(end.num_accepted_tokens for end in ends)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With tied embeddings it repeats itself, so that any part of it is often right."""
    return make_tiny_llama(tmp_path_factory.mktemp("base"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(base, tmp_path_factory.mktemp("adapter"), seed=1, scale=0.1)


SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "draft_tree": ("draft_tree:{base}", {}),
    "early_exit_tree": ("early_exit_tree:1", {}),
    "skip_tree": ("skip_tree:0", {}),
    "quantized_tree": ("quantized_tree:int8", {}),
    "int8-kv": ("early_exit_tree:1", {"kv_dtype": KvDtype.INT8}),
    "window": ("quantized_tree:int8", {"attention_window": 8, "attention_sinks": 2}),
    "preempted": ("draft_tree:{base}", {"kv_cache_bytes": 14 * 8 * 512, "kv_block_size": 8}),
}
FAST = {"draft_tree"}
"""A draft model beside the base."""


@pytest.mark.parametrize("name", marked_slow(SOURCES, slow=SOURCES.keys() - FAST))
def test_the_tokens_are_those_of_plain_decoding(
    base: Path, adapter: Path, tmp_path: Path, name: str
) -> None:
    entry, config = SOURCES[name]
    expected, _ = answers(base, tmp_path, adapter, **config)
    found, num_accepted = answers(base, tmp_path, adapter, entry.format(base=base), **config)
    assert found == expected
    assert num_accepted > 10


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_with_windows_drafts_in_its_own_cache_as_beside_it(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own cache blocks before a window are absent, in a draft model's they are masked."""
    model_type, differences = SERVED[family]
    untied = {**differences, "tie_word_embeddings": False}
    base = save_family(tmp_path / "base", model_type, untied)
    expected, _ = answers(base, tmp_path, None)
    made: list[Draft] = []
    propose = SelfDraftTreeProposer.propose

    def spying(self: SelfDraftTreeProposer, wanted: Sequence[DraftRequest]) -> list[Draft]:
        drafts = propose(self, wanted)
        made.extend(drafts)
        return drafts

    monkeypatch.setattr(SelfDraftTreeProposer, "propose", spying)
    beside, num_accepted = answers(base, tmp_path, None, f"draft_tree:{base}")
    inside, num_accepted_inside = answers(base, tmp_path, None, "quantized_tree:int8")
    assert beside == inside == expected
    assert any(draft.parents is not None for draft in made)
    assert num_accepted_inside > 0.8 * num_accepted > 20


@pytest.mark.slow
def test_a_multi_token_head_drafts_trees(tmp_path: Path) -> None:
    base = save_shipping(tmp_path / "base", "glm4_moe", repeats=True)
    folder = make_adapter(base, tmp_path / "adapter", seed=1, target_modules=["o_proj"])
    expected, _ = answers(base, tmp_path, folder)
    found, num_accepted = answers(base, tmp_path, folder, "mtp_tree")
    assert found == expected
    assert num_accepted > 10


@pytest.mark.parametrize(
    ("entries", "config", "reason"),
    [
        (["draft_tree:m"], {"acceptance": Acceptance.REJECTION}, "requires coupled acceptance"),
        (["mtp_tree"], {"acceptance": Acceptance.REJECTION}, "requires coupled acceptance"),
        (["skip_tree:1"], {"kv_dtype": KvDtype.INT4}, "not supported with --kv-dtype int4"),
        (["draft_tree:m"], {"kv_dtype": KvDtype.INT2}, "not supported with --kv-dtype int2"),
        (["draft:m", "draft_tree:m"], {}, "draft and draft_tree cannot be combined"),
        (["quantized:int8", "quantized_tree:int8"], {}, "cannot be combined"),
        (["mtp", "mtp_tree"], {}, "mtp and mtp_tree cannot be combined"),
        (["mtp_tree"], {"tensor_parallel_size": 2}, "mtp_tree is not supported with"),
        (["early_exit_tree:1"], {"pipeline_parallel_size": 2}, "early_exit_tree is not supported"),
        (["quantized_tree:int8"], {"pipeline_parallel_size": 2}, "quantized_tree is not supported"),
    ],
)
def test_what_cannot_draft_trees_is_refused_before_the_base_is_loaded(
    entries: Sequence[str], config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidParameter, match=reason) as refused:
        EngineConfig("m", speculation=tuple(entries), **config)
    assert refused.value.code


@pytest.mark.slow
def test_a_model_is_named_with_its_proposer(base: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="draft_tree requires a model: draft_tree:MODEL"):
        LocalEngine(base, tmp_path, speculation=("draft_tree",))
    with pytest.raises(InvalidParameter, match="mtp_tree: no multi-token heads of llama"):
        LocalEngine(base, tmp_path, speculation=("mtp_tree",))
