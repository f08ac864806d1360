"""One quantized base served in every way at once, beside one served plainly.

The reference is the dense base, one request at a time, without any reuse and without draft tokens,
with keys and values in the same form. Where these are quantized in groups it is the quantized base
itself: keys that differ by the rounding of inputs may get another code. The quantized base has too
little memory for its requests: prompts are cut and found in the prefix cache, sequences are swapped
out, and each request has draft tokens of one proposer.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoModelForCausalLM

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.checkpoint.base_identity import compute_base_id
from loraplex.engine.checkpoint.files import locate_base
from loraplex.engine.config import EngineConfig, KvDtype
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.kv.open_slots import num_open_slots
from loraplex.engine.messages import SpeculationParams
from loraplex.engine.scheduling.step_costs import StepCosts
from loraplex.engine.speculation.medusa_checkpoint import save_heads
from loraplex.engine.speculation.medusa_heads import untrained_heads
from support.engine import Answer, LocalEngine
from support.greedy import parts_at_near_tie
from support.models import ALL_LINEAR_TARGETS, make_adapter
from support.quantized import logit_bound
from support.quantized_bases import QuantizedBase

PROPOSERS = ("none", "ngram", "draft", "early_exit", "medusa", "medusa_tree", "quantized")
NEAR_TIE = {KvDtype.AUTO: 1e-4, KvDtype.INT8: 5e-3, KvDtype.FP8: 5e-3}
"""Logit gap, fp32, that another order of summation may cross. Rounding to codes magnifies it."""
NEAR_TIE_OF_GROUPS = 0.05
NEAR_TIE_OF_ROUNDED_INPUTS = 5e-3
"""Of int8 and int4 codes, which are multiplied by inputs of 16 bits."""
TENANTS = ("acme", "globex")
BLOCK_SIZE = 8
NUM_TOKENS = 14
NUM_DRAFT_TOKENS = 3
MAX_SEQS, MAX_STEP_TOKENS, MAX_LEN = 8, 24, 72
NUM_BLOCKS = 12
"""Of which a sequence can need up to 7."""
NUM_BLOCKS_BESIDE_STATES, NUM_STATES = 30, 10
"""Of states a sequence needs up to 2."""
MIB = 1 << 20


class Served(NamedTuple):
    """What became of the requests of one proposer."""

    proposer: str
    different: int
    """Answers that are neither the reference's nor part from it at a near tie."""
    near_ties: int
    accepted: int
    drafted: int


class Happened(NamedTuple):
    """What the engine did on the way."""

    preemptions: int
    swaps: int
    cached_tokens: int


class _Case(NamedTuple):
    prompt: list[int]
    adapter: int | None
    expected: list[int]


class Reference:
    """The reference with two adapters, and its answers."""

    def __init__(
        self,
        base: QuantizedBase,
        folder: Path,
        kv_dtype: KvDtype,
        *,
        proposers: Sequence[str] = PROPOSERS,
        targets: Sequence[str] = ALL_LINEAR_TARGETS,
        num_prompts: int = 6,
        is_quantized: bool | None = None,
    ) -> None:
        """targets: the adapters' layers. is_quantized: whether the reference is the quantized base
        itself; by default for keys and values in groups of codes."""
        folder.mkdir(parents=True)
        self._num_prompts = num_prompts
        self._is_quantized = kv_dtype.quantizes_blocks if is_quantized is None else is_quantized
        self._base, self._folder, self._kv_dtype = base, folder, kv_dtype
        self._proposers = [each for each in proposers if refusal(kv_dtype, each) is None]
        self._adapters = [
            make_adapter(
                base.plain,
                folder / name,
                seed=index,
                r=3,
                use_dora=name == "dora",
                target_modules=list(targets),
            )
            for index, name in enumerate(("lora", "dora"))
        ]
        self._alone = self._open_alone()
        self._keys = [self._alone.add_adapter(path) for path in self._adapters]
        self._cases = list(self._make_cases())

    def close(self) -> None:
        self._alone.close()

    def serve(self) -> tuple[list[Served], Happened]:
        """The quantized base's answers to the same requests, with each proposer."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepCosts, "swap_seconds", lambda *_: 0.0)  # whatever was measured
            return self._serve(self._open_crowded())

    def _serve(self, engine: LocalEngine) -> tuple[list[Served], Happened]:
        cases = [(proposer, case) for proposer in self._proposers for case in self._cases]
        random.Random(0).shuffle(cases)
        answers: dict[str, list[tuple[_Case, Answer]]] = defaultdict(list)
        for first, tenant_id in enumerate(TENANTS):  # the second comes when the first holds all
            keys = [engine.add_adapter(path, tenant_id) for path in self._adapters]
            for key in keys:
                engine.generate([0], key)
            for proposer, case in cases[first :: len(TENANTS)]:
                name = engine.submit(
                    case.prompt,
                    self._key(case, keys),
                    tenant_id=tenant_id,
                    speculation=_speculation(proposer),
                    max_tokens=NUM_TOKENS,
                    ignore_eos=True,
                )
                answers[proposer].append((case, engine.answers[name]))
            for _ in range(5):
                engine.step()
        engine.run()
        gap = NEAR_TIE.get(self._kv_dtype, NEAR_TIE_OF_GROUPS)
        if logit_bound(engine.core.parts.base) > gap:
            gap = NEAR_TIE_OF_ROUNDED_INPUTS
        served = [self._compare(proposer, answers[proposer], gap) for proposer in self._proposers]
        stats = engine.core.stats()
        happened = Happened(
            stats.num_preemptions, engine.core.parts.scheduler.num_swaps, stats.num_cached_tokens
        )
        engine.close()
        return served, happened

    def _make_cases(self) -> Iterator[_Case]:
        rng = random.Random(1)
        vocab_size = 200
        shared = [rng.randrange(vocab_size) for _ in range(2 * BLOCK_SIZE + 3)]
        for index in range(self._num_prompts):
            own = [rng.randrange(vocab_size) for _ in range(rng.randint(2, 12))] * 2
            prompt, adapter = [*(shared if index % 2 else []), *own], (None, 0, 1)[index % 3]
            key = None if adapter is None else self._keys[adapter]
            name = self._alone.submit(prompt, key, max_tokens=NUM_TOKENS, ignore_eos=True)
            self._alone.run()
            yield _Case(prompt, adapter, self._alone.answers[name].token_ids)

    def _compare(
        self, proposer: str, answers: Sequence[tuple[_Case, Answer]], gap: float
    ) -> Served:
        differing = [
            (case, answer) for case, answer in answers if answer.token_ids != case.expected
        ]
        num_near = sum(
            parts_at_near_tie(
                self._alone,
                case.prompt,
                self._key(case, self._keys),
                expected=case.expected,
                actual=answer.token_ids,
                gap=gap,
            )
            for case, answer in differing
        )
        return Served(
            proposer,
            different=len(differing) - num_near,
            near_ties=num_near,
            accepted=sum(answer.end.num_accepted_tokens for _, answer in answers),
            drafted=sum(answer.end.num_draft_tokens for _, answer in answers),
        )

    def _open_alone(self) -> LocalEngine:
        alone: dict[str, Any] = {"max_num_seqs": 1, "prefix_caching": False}
        if not self._is_quantized:
            return self._open(self._base.plain, **alone)
        return self._open(self._base.served, quantization=self._base.quantization, **alone)

    def _open_crowded(self) -> LocalEngine:
        parts = self._alone.core.parts
        kv_bytes = NUM_BLOCKS * sum(parts.plan.kv_block_bytes)
        if any(shape.states for shape in parts.base.kv_shapes):
            *per_block, per_states = parts.plan.kv_block_bytes
            kv_bytes = NUM_BLOCKS_BESIDE_STATES * sum(per_block) + NUM_STATES * per_states
        if self._kv_dtype.quantizes_blocks:
            num_open = 1 + num_open_slots(MAX_SEQS, MAX_STEP_TOKENS, BLOCK_SIZE, num_steps=1)
            elements = sum(s.num_heads * (s.key_dim + s.value_dim) for s in parts.base.kv_shapes)
            kv_bytes += num_open * BLOCK_SIZE * elements * parts.base.dtype.itemsize
        heads = self._heads()
        what = {
            "ngram": "",
            "draft": f":{self._base.plain}",
            "early_exit": ":1",
            "quantized": ":int8",
        }
        return self._open(
            self._base.served,
            quantization=self._base.quantization,
            speculation=tuple(
                f"{each}{what.get(each, f':{heads}')}" for each in self._proposers if each != "none"
            ),
            kv_cache_bytes=kv_bytes,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=MAX_STEP_TOKENS,
            swap_bytes=4 * MIB,
        )

    def _open(self, model: Path, **config: object) -> LocalEngine:
        settings = {"kv_block_size": BLOCK_SIZE, "max_model_len": MAX_LEN, **config}
        return LocalEngine(
            model, self._folder, kv_dtype=self._kv_dtype, dtype="float32", **settings
        )

    def _heads(self) -> Path:
        """Medusa heads for the quantized base."""
        path = self._folder / "heads"
        head = AutoModelForCausalLM.from_pretrained(self._base.plain).get_output_embeddings()
        heads = untrained_heads(head, num_heads=3, num_layers=1)
        save_heads(heads, path, base_id=compute_base_id(locate_base(str(self._base.served))))
        return path

    @staticmethod
    def _key(case: _Case, keys: Sequence[AdapterKey]) -> AdapterKey | None:
        return None if case.adapter is None else keys[case.adapter]


def refusal(kv_dtype: KvDtype, proposer: str) -> str | None:
    """Why an engine with these two does not start; None: it does."""
    speculation = () if proposer == "none" else (f"{proposer}:1",)
    try:
        EngineConfig("base", kv_dtype=kv_dtype, speculation=speculation)
    except InvalidParameter as exc:
        return str(exc)
    return None


def _speculation(proposer: str) -> SpeculationParams:
    if proposer == "none":
        return SpeculationParams(num_tokens=0)
    return SpeculationParams(proposer, NUM_DRAFT_TOKENS)
