"""Speculation on one device: the tokens of plain decoding, and the model's distribution."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random
from typing import Any

import torch
from benchmarks.speculation_arms import Arm, Decoding, Job

from loraplex.engine.checkpoint.base_identity import compute_base_id
from loraplex.engine.config import Acceptance
from loraplex.engine.draft import Draft
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.speculation.acceptors import Acceptor, make_acceptor
from loraplex.engine.speculation.medusa_checkpoint import save_heads
from support.chi_square import p_value
from support.eagle import save_random_head
from support.medusa import make_heads
from support.models import make_adapter, make_tiny_llama
from support.mtp import save_shipping
from support.speculation import ScriptedProposer, ScriptedTreeProposer, scripted

TEMPERATURES = (0.0, 0.7, 1.3)
NUM_JOBS = 18
ANSWER_TOKENS = 40
NUM_DRAFT_TOKENS = 6
ERROR = 0.3
"""Of the scripted draft tokens so many are wrong."""
MUST_HOLD = (
    "ngram",
    "draft",
    "draft_tree",
    "mtp",
    "mtp_tree",
    ScriptedProposer.name,
    ScriptedTreeProposer.name,
)
"""Who proposes something right; of an untrained model's first layer and heads nothing is known."""
ATTENTION_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
LEAST_VOCAB_SIZE = 128
"""Of the bases."""
NUM_DRAWS = 4_000
LEAST_P_VALUE = 1e-4


def check_speculation(directory: Path, *, device: str) -> dict[str, Any]:
    """Greedy and sampled requests, base and adapters, in one batch; then each acceptor alone."""
    base = make_tiny_llama(directory / "drafted-base")
    shipping = save_shipping(directory / "shipping-base", "glm4_moe", repeats=True)
    proposers = {
        **_check_identity(base, _configurations(base), device=device),
        **_check_identity(
            shipping, ["mtp", "mtp_tree"], device=device, target_modules=ATTENTION_TARGETS
        ),
    }
    p_values = {
        acceptance.value: least_p_value(make_acceptor(acceptance), device=device)
        for acceptance in Acceptance
    }
    is_same = all(not found["different_beyond_near_ties"] for found in proposers.values())
    # All of these steps have fewer tokens than a graph's rows.
    are_replayed = not any(found["steps_without_graph"] for found in proposers.values())
    some_held = all(proposers[name]["accepted_tokens"] for name in MUST_HOLD)
    is_fair = all(value > LEAST_P_VALUE for value in p_values.values())
    is_ok = is_same and some_held and is_fair and (are_replayed or device != "cuda")
    return {"ok": is_ok, "proposers": proposers, "p_values": p_values}


def _check_identity(
    base: Path, configurations: list[str], *, device: str, **lora: Any
) -> dict[str, dict[str, int]]:
    """By proposer of this base how its answers compare with those of plain decoding. `lora`: for
    the configuration of its adapters."""
    adapters = {
        f"r{rank}": make_adapter(
            base, base.with_name(f"{base.name}-r{rank}"), seed=rank, r=rank, **lora
        )
        for rank in (4, 16)
    }
    jobs = _make_jobs([None, *adapters])

    def open_arm(*speculation: str) -> Arm:
        return Arm(base, base.parent, speculation=speculation, adapters=adapters, device=device)

    found = {}
    with closing(open_arm()) as plain, ExitStack() as stack:
        expected = plain.run(jobs).answers
        answers = {str(index): answer for index, answer in enumerate(expected)}
        for kind in (ScriptedProposer, ScriptedTreeProposer):
            stack.enter_context(scripted(kind(answers, error=ERROR)))
        for entry in configurations:
            with closing(open_arm(entry)) as arm:
                arm.begin(jobs, num_forced=NUM_DRAFT_TOKENS)
                num_before = _num_eager_steps(arm)
                actual = arm.end()
                num_eager = _num_eager_steps(arm) - num_before
            compared = _compare(plain, jobs, expected, actual)
            found[entry.partition(":")[0]] = compared | {"steps_without_graph": num_eager}
    return found


def _num_eager_steps(arm: Arm) -> int:
    stats = arm.engine.core.stats()
    return stats.num_steps - stats.num_graph_steps


def _configurations(base: Path) -> list[str]:
    """What is said of each proposer; the draft model is the base itself, the heads are random."""
    config = json.loads((base / "config.json").read_text())
    heads = make_heads(config["hidden_size"], config["vocab_size"], num_heads=2)
    checkpoint = base.with_name("drafted-heads")
    save_heads(heads, checkpoint, base_id=compute_base_id(base))
    head = base.with_name("drafted-head")
    save_random_head(base, head)
    return [
        ScriptedProposer.name,
        ScriptedTreeProposer.name,
        "ngram",
        f"draft:{base}",
        f"draft_tree:{base}",
        "early_exit:1",
        "early_exit_tree:1",
        "quantized_tree:int8",
        f"medusa:{checkpoint}",
        f"medusa_tree:{checkpoint}",
        f"eagle:{head}",
        f"eagle_tree:{head}",
    ]


def _compare(
    plain: Arm, jobs: list[Job], expected: list[list[int]], actual: Decoding
) -> dict[str, int]:
    parted = [
        plain.is_near_tie(job, *answers)
        for job, *answers in zip(jobs, expected, actual.answers, strict=True)
        if answers[0] != answers[1]
    ]
    return {
        "tokens": sum(map(len, actual.answers)),
        "draft_tokens": actual.num_draft_tokens,
        "accepted_tokens": actual.num_accepted_tokens,
        "different_beyond_near_ties": parted.count(False),
        "near_ties": parted.count(True),
    }


def _make_jobs(adapters: list[str | None]) -> list[Job]:
    """Prompts that repeat themselves, so that there is something to look up."""
    rng = Random(0)
    phrase = [rng.randrange(LEAST_VOCAB_SIZE) for _ in range(7)]
    return [
        Job(
            [*phrase * rng.randint(1, 6), *phrase[: rng.randint(1, 6)]],
            adapters[index % len(adapters)],
            num_tokens=ANSWER_TOKENS,
            temperature=TEMPERATURES[index // len(adapters) % len(TEMPERATURES)],
            seed=index,
        )
        for index in range(NUM_JOBS)
    ]


def least_p_value(acceptor: Acceptor, *, device: str) -> float:
    """Whether first tokens, and second ones where the first draft token held, come as often as the
    target's probabilities say, whatever others drafted: the lower of two chi-square tests."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 8, generator=generator)
    drafted = torch.randn(2, 8, generator=generator).softmax(-1)
    drafts = drafted.multinomial(NUM_DRAWS, replacement=True, generator=generator).T.tolist()
    probabilities = drafted.to(device)
    requests = [
        _make_request(seed, Draft(tuple(tokens), probabilities=probabilities))
        for seed, tokens in enumerate(drafts)
    ]
    accepted = acceptor.accept(requests, logits.repeat(NUM_DRAWS, 1).to(device))
    firsts = [found.token_ids[0] for found in accepted]
    seconds = [found.token_ids[1] for found in accepted if found.path]
    expected = logits.softmax(-1)
    return min(
        p_value(torch.tensor(firsts), expected[0]), p_value(torch.tensor(seconds), expected[1])
    )


def _make_request(seed: int, draft: Draft) -> Request:
    submitted = GenerationRequest(str(seed), "acme", [1], SamplingParams())
    namespace = CacheNamespace("acme", "runtime", None)
    request = Request(submitted, namespace, seed=seed, arrival_time=0.0, adapter_tier=None)
    request.draft = draft
    return request
