"""Speculation changes nothing but the speed: the tokens are those of plain decoding."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support.engine import LocalEngine
from support.models import make_adapter
from support.speculation import ScriptedProposer, scripted


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize("proposer", ["ngram", "scripted"])
def test_the_tokens_are_those_of_plain_decoding(
    tiny_base: Path, tmp_path: Path, temperature: float, proposer: str
) -> None:
    folders = [make_adapter(tiny_base, tmp_path / f"a{r}", seed=r, r=r) for r in (2, 8)]
    rng = random.Random(1)
    phrase = [rng.randrange(256) for _ in range(7)]
    prompts = [phrase * rng.randrange(1, 5) for _ in range(6)]

    def answers(*speculation: str) -> tuple[dict[str, list[int]], int]:
        engine = LocalEngine(tiny_base, tmp_path, speculation=speculation)
        keys = [None, *(engine.add_adapter(folder) for folder in folders)]
        for index, prompt in enumerate(prompts):
            engine.submit(
                prompt,
                keys[index % 3],
                request_id=str(index),
                max_tokens=40,
                temperature=temperature,
                seed=index,
            )
        engine.run()
        engine.close()
        tokens = {name: answer.token_ids for name, answer in engine.answers.items()}
        ends = [answer.finished for answer in engine.answers.values()]
        return tokens, sum(end.num_accepted_tokens for end in ends if end)

    plain, _ = answers()
    with scripted(ScriptedProposer(plain, error=0.3)):
        speculated, num_accepted = answers(proposer)
    assert speculated == plain
    assert num_accepted > 20 or proposer == "ngram"
