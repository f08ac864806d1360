"""Every pair of sampling parameters, adapters and proposers: the answer of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.messages import FinishReason, SpeculationParams
from support.engine import Answer, LocalEngine
from support.models import make_adapter
from support.pairwise import Row, all_pairs, covering_rows, pairs_of
from support.speculation import ScriptedProposer, scripted

PROPOSERS: dict[str, tuple[str, float]] = {
    "ngram": ("ngram", 0.0),
    "right": ("scripted", 0.0),
    "wrong": ("scripted", 1.0),
    "mixed": ("scripted", 0.3),
}
"""What the engine's configuration says, and how often a scripted proposer is wrong."""
PARAMETERS: dict[str, tuple[Any, ...]] = {
    "proposer": tuple(PROPOSERS),
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
    "max_tokens": (1, 7, 40),
    "num_tokens": (None, 1, 8),
}
"""`adapter`: which of those that there are. `n`: choices. `num_tokens`: guesses that the request
asks for. All others are sampling parameters, those with False and True in some value."""
ROWS = covering_rows(PARAMETERS)
BIASES = {3: 2.0, 77: -100.0, 200: 1.5}
STOP_TOKENS = (5, 60, 111, 180, 233)
ENGINE_SEED = 987654321
"""Of requests that bring none: the engine draws it."""


def test_every_pair_of_values_occurs() -> None:
    occurring = {pair for row in ROWS for pair in pairs_of(row)}
    assert occurring >= set(all_pairs(PARAMETERS))
    assert len(ROWS) <= 25, "each row takes its time"
    assert covering_rows(PARAMETERS) == ROWS


@pytest.fixture(scope="module")
def adapter_folders(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(tiny_base, root / f"{r}", seed=r, r=r, scale=0.1) for r in (2, 8)]


@pytest.fixture(scope="module", autouse=True)
def _one_seed_for_requests_without() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loraplex.engine.core.secrets.randbits", lambda _: ENGINE_SEED)
        yield


@pytest.fixture(scope="module")
def plain(
    tiny_base: Path, adapter_folders: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalEngine]:
    """The rows decoded without guesses."""
    engine = LocalEngine(tiny_base, tmp_path_factory.mktemp("plain"))
    submit(engine, adapter_folders, range(len(ROWS)))
    engine.run()
    yield engine
    engine.close()


def submit(engine: LocalEngine, folders: Sequence[Path], numbers: Sequence[int]) -> None:
    """Queue these rows, each with as many choices as it has."""
    keys = [engine.add_adapter(folder) for folder in folders]
    for key in keys:  # there from the start: who runs with whom decides the rounding
        engine.submit([1], key, max_tokens=1)
    engine.run()
    for number in numbers:
        row = ROWS[number]
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
    others = {"proposer", "adapter", "n", "num_tokens", "logit_bias", "stop_token_ids", "seed"}
    sampling = {name: value for name, value in row.items() if name not in others}
    sampling["logit_bias"] = BIASES if row["logit_bias"] else {}
    sampling["stop_token_ids"] = STOP_TOKENS if row["stop_token_ids"] else ()
    sampling["seed"] = None if row["seed"] is None else row["seed"] + choice
    return sampling


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_a_combination_answers_as_with_plain_decoding(
    tiny_base: Path,
    tmp_path: Path,
    adapter_folders: list[Path],
    plain: LocalEngine,
    proposer: str,
) -> None:
    numbers = [number for number, row in enumerate(ROWS) if row["proposer"] == proposer]
    name, error = PROPOSERS[proposer]
    answers = {request_id: answer.token_ids for request_id, answer in plain.answers.items()}
    with scripted(ScriptedProposer(answers, error=error)):
        engine = LocalEngine(tiny_base, tmp_path, speculation=(name,))
    submit(engine, adapter_folders, numbers)
    engine.run()
    for number in numbers:
        for choice in range(ROWS[number]["n"]):
            request_id = f"{number}.{choice}"
            check(ROWS[number], engine.answers[request_id], plain.answers[request_id])
    stats = engine.core.stats()
    assert stats.num_free_kv_blocks == engine.core.info.num_kv_blocks
    num_accepted = sum(_end(answer).num_accepted_tokens for answer in engine.answers.values())
    assert (num_accepted > 20) == (proposer in ("right", "mixed")) or proposer == "ngram"
    engine.close()


def check(row: Row, answer: Answer, plain: Answer) -> None:
    """One end, as many tokens as it says, and everything as without guesses."""
    end, expected = _end(answer), _end(plain)
    assert answer.token_ids == plain.token_ids
    assert end.num_generated_tokens == len(answer.token_ids) <= row["max_tokens"]
    assert (end.reason, end.stop_token_id) == (expected.reason, expected.stop_token_id)
    if end.reason is FinishReason.LENGTH:
        assert len(answer.token_ids) == row["max_tokens"]
    entries = [entry for event in answer.tokens for entry in event.logprobs or ()]
    others = [entry for event in plain.tokens for entry in event.logprobs or ()]
    has_logprobs = row["num_logprobs"] is not None
    assert len(entries) == len(others) == (len(answer.token_ids) if has_logprobs else 0)
    for token, entry, other in zip(answer.token_ids, entries, others, strict=False):
        assert entry.chosen.token_id == other.chosen.token_id == token
        assert entry.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-5)
        assert len(entry.top) == row["num_logprobs"]
        assert [top.logprob for top in entry.top] == pytest.approx(
            [top.logprob for top in other.top], abs=1e-5
        )


def _end(answer: Answer) -> Any:
    assert answer.finished is not None
    assert answer.finished.error is None
    return answer.finished
