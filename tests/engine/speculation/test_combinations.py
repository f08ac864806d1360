"""Every pair of parameters and adapters with every proposer: the output of plain decoding."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.checkpoint.base_identity import compute_base_id
from loraplex.engine.config import TREE_PROPOSERS, Acceptance
from loraplex.engine.grammars.spec import GrammarKind, GrammarSpec
from loraplex.engine.messages import FinishReason, SpeculationParams
from loraplex.engine.speculation.medusa_checkpoint import save_heads
from loraplex.engine.speculation.medusa_heads import untrained_heads
from loraplex.engine.text.tokenizer import Tokenizer
from support.eagle import save_random_head
from support.engine import Answer, LocalEngine
from support.grammars import has_llguidance
from support.pairwise import Row, all_pairs, covering_rows, pairs_of
from support.speculation import ScriptedProposer, assert_same_answer, scripted, ticking_clock

PROPOSERS = {
    "ngram": "ngram",
    "right": "scripted",
    "wrong": "scripted",
    "mixed": "scripted",
    "draft": "draft:{base}",
    "draft_tree": "draft_tree:{base}",
    "early_exit": "early_exit:1",
    "medusa": "medusa:{heads}",
    "medusa_tree": "medusa_tree:{heads}",
    "eagle": "eagle:{eagle}",
    "eagle_tree": "eagle_tree:{eagle}",
}
"""What the engine's configuration says."""
SERVED = [
    (proposer, acceptance)
    for proposer, acceptance in product(PROPOSERS, Acceptance)
    if proposer not in TREE_PROPOSERS or acceptance is Acceptance.COUPLED
]
SLOW = {
    *(("wrong", acceptance) for acceptance in Acceptance),
    ("draft_tree", Acceptance.COUPLED),
    *(
        (proposer, Acceptance.REJECTION)
        for proposer in ("ngram", "right", "draft", "medusa", "eagle")
    ),
}
"""Pairs of which `mixed` and `early_exit` have the like."""
ERRORS = {"right": 0.0, "wrong": 1.0, "mixed": 0.3}
"""How often a scripted proposer is wrong."""
PARAMETERS: dict[str, tuple[Any, ...]] = {
    "adapter": (None, 0, 1),
    "temperature": (0.0, 0.7, 1.3),
    "top_k": (0, 5),
    "top_p": (1.0, 0.8),
    "min_p": (0.0, 0.1),
    "repetition_penalty": (1.0, 1.3),
    "presence_penalty": (0.0, 0.7),
    "frequency_penalty": (0.0, -0.4),
    "logit_bias": (False, True),
    "seed": (None, 5),
    "num_logprobs": (None, 0, 5),
    "n": (1, 3),
    "stop_token_ids": (False, True),
    "ignore_eos": (False, True),
    "max_tokens": (1, 7, 24),
    "num_tokens": (None, 1, 6),
    "grammar": (None, "object", "letters") if has_llguidance() else (None,),
}
"""`adapter`: which of those that there are. `n`: choices. `num_tokens`: draft tokens that the
request asks for. `grammar`: of `GRAMMARS`. Those behind `adapter` are sampling parameters, with
False and True for some value."""
ROWS = covering_rows(PARAMETERS)
BIASES = {3: 2.0, 77: -100.0, 200: 1.5}
STOP_TOKENS = (5, 60, 111, 180, 233)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "string", "maxLength": 3}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMARS = {
    "object": GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "letters": GrammarSpec(GrammarKind.REGEX, "([a-m]|[N-Z]){2,}"),
}
ENGINE_SEED = 987654321
"""Of requests that bring none: the engine draws it."""


def test_every_pair_of_values_occurs() -> None:
    occurring = {pair for row in ROWS for pair in pairs_of(row)}
    assert occurring >= set(all_pairs(PARAMETERS))
    assert len(ROWS) <= 20, "each row takes its time"
    assert covering_rows(PARAMETERS) == ROWS


@pytest.fixture(scope="module")
def heads(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads")
    output_head = AutoModelForCausalLM.from_pretrained(tiny_base).get_output_embeddings()
    untrained = untrained_heads(output_head, num_heads=3, num_layers=1)
    save_heads(untrained, path, base_id=compute_base_id(tiny_base))
    return path


@pytest.fixture(scope="module")
def eagle(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eagle")
    save_random_head(tiny_base, path)
    return path


@pytest.fixture(scope="module", autouse=True)
def _one_seed_for_requests_without() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loraplex.engine.request_lifecycle.secrets.randbits", lambda _: ENGINE_SEED)
        yield


@pytest.fixture(scope="module")
def plain(
    tiny_base: Path, adapter_folders: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalEngine]:
    """The rows decoded without draft tokens."""
    engine = LocalEngine(tiny_base, tmp_path_factory.mktemp("plain"))
    submit(engine, adapter_folders)
    engine.run()
    yield engine
    engine.close()


def submit(engine: LocalEngine, folders: Sequence[Path]) -> None:
    """Queue the rows, each with as many choices as it has."""
    keys = [engine.add_adapter(folder) for folder in folders]
    for key in keys:  # there from the start: who runs with whom decides the rounding
        engine.submit([1], key, max_tokens=1)
    engine.run()
    for number, row in enumerate(ROWS):
        for choice in range(row["n"]):
            engine.submit(
                _prompt(number),
                _adapter(row, keys),
                request_id=f"{number}.{choice}",
                group_id=f"g{number}" if row["n"] > 1 else None,
                speculation=SpeculationParams(num_tokens=row["num_tokens"]),
                **_sampling(row, choice),
            )


def _prompt(number: int) -> list[int]:
    """Repetitive, so that something is found in it."""
    rng = random.Random(number)
    phrase = [rng.randrange(256) for _ in range(6)]
    return phrase * rng.randint(1, 5)


def _adapter(row: Row, keys: Sequence[AdapterKey]) -> AdapterKey | None:
    return None if row["adapter"] is None else keys[row["adapter"]]


def _sampling(row: Row, choice: int) -> dict[str, Any]:
    others = {"adapter", "n", "num_tokens"}
    sampling = {name: value for name, value in row.items() if name not in others}
    sampling["logit_bias"] = BIASES if row["logit_bias"] else {}
    sampling["stop_token_ids"] = STOP_TOKENS if row["stop_token_ids"] else ()
    sampling["grammar"] = GRAMMARS.get(row["grammar"])
    sampling["seed"] = None if row["seed"] is None else row["seed"] + choice
    return sampling


@pytest.mark.parametrize(
    ("proposer", "acceptance"),
    [pytest.param(*pair, marks=pytest.mark.slow if pair in SLOW else ()) for pair in SERVED],
)
def test_a_combination_answers_as_with_plain_decoding(
    tiny_base: Path,
    tmp_path: Path,
    adapter_folders: list[Path],
    heads: Path,
    eagle: Path,
    plain: LocalEngine,
    proposer: str,
    acceptance: Acceptance,
) -> None:
    known = {request_id: answer.token_ids for request_id, answer in plain.answers.items()}
    entry = PROPOSERS[proposer].format(base=tiny_base, heads=heads, eagle=eagle)
    with scripted(ScriptedProposer(known, error=ERRORS.get(proposer, 0.0))):
        engine = LocalEngine(
            tiny_base,
            tmp_path,
            speculation=(entry,),
            acceptance=acceptance,
            clock=ticking_clock(),
        )
    submit(engine, adapter_folders)
    engine.run()
    engine.close()
    tokenizer = Tokenizer(tiny_base)
    stats = engine.core.stats()
    assert stats.num_free_kv_blocks == engine.core.info.num_kv_blocks
    for number, row in enumerate(ROWS):
        for choice in range(row["n"]):
            request_id = f"{number}.{choice}"
            assert_sound(row, engine.answers[request_id], engine.core.parts.base.eos_token_ids)
            assert_grammatical(row, engine.answers[request_id], tokenizer)
            if acceptance is Acceptance.COUPLED or row["temperature"] == 0:
                assert_same_answer(engine.answers[request_id], plain.answers[request_id])
    ends = [answer.end for answer in engine.answers.values()]
    num_drafted = sum(end.num_draft_tokens for end in ends)
    num_accepted = sum(end.num_accepted_tokens for end in ends)
    assert num_drafted > num_accepted or (proposer, acceptance) == ("right", Acceptance.COUPLED)
    assert num_accepted > 50 or proposer not in ("right", "mixed", "draft", "draft_tree")


def assert_sound(row: Row, answer: Answer, eos_token_ids: Collection[int]) -> None:
    """One end where there has to be one, as many tokens as it says, and what was asked for."""
    end = answer.end
    assert end.error is None
    *others, last = answer.token_ids
    stops = {
        *(STOP_TOKENS if row["stop_token_ids"] else ()),
        *(() if row["ignore_eos"] and row["grammar"] is None else eos_token_ids),
    }
    assert not stops.intersection(others)
    if last in stops:
        assert (end.reason, end.stop_token_id) == (FinishReason.STOP, last)
    else:
        assert (end.reason, end.stop_token_id) == (FinishReason.LENGTH, None)
        assert len(answer.token_ids) == row["max_tokens"]
    assert end.num_generated_tokens == len(answer.token_ids) <= row["max_tokens"]
    assert 0 <= end.num_accepted_tokens <= min(end.num_draft_tokens, len(others))
    if row["num_logprobs"] is None:
        assert not answer.logprobs
    else:
        assert [entry.chosen.token_id for entry in answer.logprobs] == answer.token_ids
        assert {len(entry.top) for entry in answer.logprobs} == {row["num_logprobs"]}


def assert_grammatical(row: Row, answer: Answer, tokenizer: Tokenizer) -> None:
    """As far as the output goes, which a limit or a stop token may have cut off."""
    text = b"".join(map(tokenizer.token_bytes, answer.token_ids))
    is_whole = answer.end.stop_token_id in tokenizer.eos_token_ids
    if row["grammar"] == "letters":
        assert re.fullmatch(rb"[a-mN-Z]*(<\|end\|>)?", text)
    if row["grammar"] == "object":
        import jsonschema  # here: where there are no grammars it may be missing

        assert text.startswith(b'{"a":'[: len(text)])
        if is_whole:
            jsonschema.validate(json.loads(text.removesuffix(b"<|end|>")), SCHEMA)
    if is_whole and row["grammar"]:
        assert len(answer.token_ids) > 2
