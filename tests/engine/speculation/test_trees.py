"""Draft trees change only the speed, with any attention of the model.

Random trees, in which the correct draft tokens are hidden among random branches at any index,
compared with plain decoding.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.config import KvDtype
from loraplex.engine.messages import SpeculationParams
from support.engine import LocalEngine
from support.families import SERVED, VOCAB_SIZE, save_family
from support.greedy import parts_at_near_tie
from support.marks import marked_slow
from support.models import make_adapter
from support.speculation import ScriptedTreeProposer, scripted

NEAR_TIE = {KvDtype.AUTO: 1e-4, KvDtype.INT8: 0.05}
"""Logit gap that another order of summation may cross; rounding to codes magnifies it."""
MAX_NEAR_TIES = 1
"""Of the answers of one case."""
NUM_TOKENS = 30
EAGER = SpeculationParams(num_tokens=6)


@dataclass(frozen=True)
class Case:
    family: str
    temperature: float = 0.0
    config: Mapping[str, object] = field(default_factory=dict)

    @property
    def near_tie(self) -> float:
        return NEAR_TIE[KvDtype(str(self.config.get("kv_dtype", "auto")))]


CASES = {
    "llama": Case("llama"),
    "warm": Case("llama", 0.7),
    "hot": Case("llama", 1.3),
    "int8-kv": Case("llama", config={"kv_dtype": KvDtype.INT8}),
    "window": Case("mistral-window", 0.7),
    "window-int8-kv": Case("mistral-window", config={"kv_dtype": KvDtype.INT8}),
    "two-groups": Case("gemma2-softcap-window"),
    "chunks": Case("llama4-chunks"),
    "slopes": Case("bloom-slopes"),
    "sinks": Case("gpt_oss-sinks-window", 0.7),
    "operators-window": Case("llama", config={"attention_window": 8, "attention_sinks": 2}),
    "latent": Case("deepseek_v2-mla"),
    "learned-positions": Case("gpt2-conv1d", 1.3),
}
SLOW_CASES = {"warm", "window-int8-kv", "chunks", "slopes", "sinks", "learned-positions"}
"""Cases of which the others have each part."""
LORA: dict[str, dict[str, object]] = {
    "gpt2-conv1d": {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    "deepseek_v2-mla": {"target_modules": ["q_proj", "o_proj"]},
    "bloom-slopes": {"target_modules": ["query_key_value", "dense"]},
}
OTHERS_LORA = {"target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize("name", marked_slow(CASES, slow=SLOW_CASES))
def test_the_tokens_are_those_of_plain_decoding(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model_type, differences = SERVED[case.family]
    # A random model with tied embeddings repeats its last token, whatever its cache says.
    untied = {**differences, "tie_word_embeddings": False}
    base = save_family(tmp_path / "base", model_type, untied)
    lora = LORA.get(case.family, OTHERS_LORA)
    adapter = make_adapter(base, tmp_path / "adapter", seed=1, **lora)
    plain = LocalEngine(base, tmp_path, **case.config)
    answers, _ = answer(plain, adapter, case)
    with scripted(ScriptedTreeProposer(answers, error=0.15, vocab_size=VOCAB_SIZE)) as name:
        engine = LocalEngine(base, tmp_path, speculation=(name,), **case.config)
        speculated, num_accepted = answer(engine, adapter, case)
    engine.close()
    differing = [name for name in answers if speculated[name] != answers[name]]
    near_ties = [name for name in differing if is_near_tie(plain, name, speculated[name], case)]
    plain.close()
    assert set(differing) == set(near_ties)
    assert len(near_ties) <= MAX_NEAR_TIES
    assert num_accepted > NUM_TOKENS


def is_near_tie(plain: LocalEngine, request_id: str, tokens: list[int], case: Case) -> bool:
    """Whether a greedy answer parts from the plain one where that decides by rounding."""
    return case.temperature == 0.0 and parts_at_near_tie(
        plain,
        prompts()[request_id],
        engine_keys(plain)[int(request_id) % 2],
        expected=plain.answers[request_id].token_ids,
        actual=tokens,
        gap=case.near_tie,
    )


def prompts() -> dict[str, list[int]]:
    """Of a few tokens, and longer than any window."""
    rng = random.Random(1)
    return {
        str(index): [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        for index, length in enumerate((3, 9, 20, 37))
    }


def engine_keys(engine: LocalEngine) -> list[AdapterKey | None]:
    """The base and the adapter."""
    return [None, *engine.paths]


def answer(engine: LocalEngine, adapter: Path, case: Case) -> tuple[dict[str, list[int]], int]:
    """Each prompt's answer, every other one under the adapter, and how many draft tokens held."""
    engine.add_adapter(adapter)
    keys = engine_keys(engine)
    for request_id, prompt in prompts().items():
        engine.submit(
            prompt,
            keys[int(request_id) % 2],
            request_id=request_id,
            max_tokens=NUM_TOKENS,
            temperature=case.temperature,
            seed=int(request_id),
            ignore_eos=True,
            speculation=EAGER,
        )
    engine.run()
    tokens = {name: entry.token_ids for name, entry in engine.answers.items()}
    ends = [entry.finished for entry in engine.answers.values()]
    return tokens, sum(end.num_accepted_tokens for end in ends if end)
