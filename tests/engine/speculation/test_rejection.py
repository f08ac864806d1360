"""Whatever is drafted, the output has the distribution of plain decoding.

The target is a Markov chain over six tokens: the probability of each of the 216 continuations of
three tokens is known exactly, and compared with its frequency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.engine.config import Acceptance
from loraplex.engine.draft import NO_DRAFT, Draft
from loraplex.engine.execution.sampler import (
    Stream,
    gumbel_noise,
    row_after,
    sample,
    uniform_noise,
)
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import GenerationRequest, SpeculationParams
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.speculation import acceptors
from loraplex.engine.speculation.acceptors import Acceptor, CoupledAcceptor, RejectionAcceptor
from loraplex.engine.speculation.drawing import (
    CoupledDrawing,
    DraftDrawing,
    GrowingChain,
    IndependentDrawing,
    draw_next,
)
from support.chi_square import p_value
from support.engine import LocalEngine
from support.models import make_tiny_llama

VOCAB_SIZE = 6
LENGTH = 3
NUM_DRAWS = 200_000
NUM_REQUESTS = 500
ALPHA = 1e-4 / 30
"""Of one test, so that the whole file raises a false alarm once in ten thousand seeds."""


def random_logits(seed: int, scale: float = 1.2) -> Tensor:
    """Row t: what comes behind token t."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator) * scale


TARGET = random_logits(0)
SKEWED = TARGET + random_logits(1)
"""A proposer that knows something of the target."""
WITH_ZEROS = SKEWED.masked_fill(torch.eye(VOCAB_SIZE, dtype=torch.bool), -1e9)
"""One that holds impossible what the target does not."""


@dataclass(frozen=True)
class MarkovProposer:
    """Draft tokens `LENGTH` tokens by a Markov chain of its own."""

    logits: Tensor
    drawing: DraftDrawing
    tells: bool = True
    """Whether it says what it drew from."""

    def propose(self, requests: Sequence[Request]) -> None:
        """Fill their drafts."""
        chains = [GrowingChain(request, LENGTH) for request in requests]
        for _ in range(LENGTH):
            last = [(chain.token_ids or chain.request.token_ids)[-1] for chain in chains]
            draw_next(chains, self.logits[last], self.drawing)
        for chain in chains:
            draft = chain.draft()
            chain.request.draft = draft if self.tells else Draft(draft.token_ids)


def make_seeds(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator)


def make_requests(count: int, params: SamplingParams) -> list[Request]:
    """Their prompt is the token 0."""
    submitted = GenerationRequest("r", "acme", [0], params)
    namespace = CacheNamespace("acme", "runtime", None)
    seeds = make_seeds(count).tolist()
    return [Request(submitted, namespace, seed, 0.0, None) for seed in seeds]


def target_logits(requests: Sequence[Request]) -> Tensor:
    """For each the row of its last token, then those of its draft."""
    tokens = [t for r in requests for t in (r.token_ids[-1], *r.draft.token_ids)]
    return TARGET[tokens]


def continuations(
    acceptor: Acceptor,
    propose: Callable[[Sequence[Request]], None],
    params: SamplingParams,
    *,
    count: int,
) -> Tensor:
    """The number of each request's first `LENGTH` tokens, as digits of base `VOCAB_SIZE`."""
    requests = make_requests(count, params)
    while growing := [r for r in requests if r.num_generated_tokens < LENGTH]:
        propose(growing)
        accepted = acceptor.accept(growing, target_logits(growing))
        for request, (_, token_ids) in zip(growing, accepted, strict=True):
            request.token_ids += token_ids
            request.draft = NO_DRAFT
    return numbered(torch.tensor([r.token_ids[1 : 1 + LENGTH] for r in requests]))


def numbered(tokens: Tensor) -> Tensor:
    """`[count, length]` as one number per row."""
    digits = VOCAB_SIZE ** torch.arange(tokens.shape[-1] - 1, -1, -1)
    return (tokens * digits).sum(-1)


def step_distribution(params: SamplingParams, logits: Tensor = TARGET) -> Tensor:
    """What is drawn from, by the token before: fp32 `[VOCAB_SIZE, VOCAB_SIZE]`."""
    scaled = logits / params.temperature
    if params.top_k:
        kth = scaled.topk(params.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < kth, float("-inf"))
    return scaled.softmax(-1)


def chain_distribution(params: SamplingParams) -> Tensor:
    """The exact probability of each continuation, by its number."""
    step = step_distribution(params).double()
    return (step[0][:, None, None] * step[:, :, None] * step[None]).flatten()


def nobody(requests: Sequence[Request]) -> None:
    """Plain decoding."""


def one_hot(tokens: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(tokens, VOCAB_SIZE).float()


PROPOSED: dict[str, Tensor] = {
    "point mass": one_hot(SKEWED.argmax(-1)),
    "the target itself": TARGET.softmax(-1),
    "skewed": SKEWED.softmax(-1),
    "with zeros": WITH_ZEROS.softmax(-1),
}
"""What a draft token is drawn from, by the token before it."""
PLAIN = SamplingParams()
CUT = SamplingParams(temperature=0.8, top_k=4)


def own_noise(seeds: Tensor, positions: Tensor) -> Tensor:
    return uniform_noise(seeds, positions, Stream.ACCEPTANCE)


def drawn_by_rule(
    proposed: Tensor,
    params: SamplingParams,
    *,
    tells: bool = True,
    count: int = NUM_DRAWS,
    noise: Callable[[Tensor, Tensor], Tensor] = own_noise,
    correction: Stream = Stream.CORRECTION,
) -> Tensor:
    """The number of each of `count` continuations, drafted and judged token by token."""
    seeds = make_seeds(count)
    target = step_distribution(params)
    tokens = [torch.zeros(count, dtype=torch.int64)]
    for place in range(1, 1 + LENGTH):
        p, q = target[tokens[-1]], proposed[tokens[-1]]
        positions = torch.full_like(seeds, place)
        draft_token = (q.log() + gumbel_noise(seeds, positions, VOCAB_SIZE, Stream.DRAFT)).argmax(
            -1
        )
        q = q if tells else one_hot(draft_token)
        is_accepted = acceptors.accepts(
            chance(p, draft_token), chance(q, draft_token), noise(seeds, positions)
        )
        weights = acceptors.leftover(p, q).log()
        other = (weights + gumbel_noise(seeds, positions, VOCAB_SIZE, correction)).argmax(-1)
        tokens.append(torch.where(is_accepted, draft_token, other))
    return numbered(torch.stack(tokens[1:], -1))


def chance(probabilities: Tensor, tokens: Tensor) -> Tensor:
    return probabilities.gather(-1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("params", [PLAIN, CUT], ids=["plain", "top-k"])
@pytest.mark.parametrize("case", PROPOSED)
def test_the_rule_keeps_the_distribution(case: str, params: SamplingParams) -> None:
    drawn = drawn_by_rule(PROPOSED[case], params)
    assert p_value(drawn, chain_distribution(params)) > ALPHA


def test_a_drawn_draft_may_be_judged_as_a_point_mass() -> None:
    drawn = drawn_by_rule(PROPOSED["skewed"], PLAIN, tells=False)
    assert p_value(drawn, chain_distribution(PLAIN)) > ALPHA


def resample_from_target(target: Tensor, _proposed: Tensor) -> Tensor:
    """The correction forgets what the draft tokens have already given."""
    return target


def accept_always(p: Tensor, _q: Tensor, _noise: Tensor) -> Tensor:
    return torch.ones_like(p, dtype=torch.bool)


def accept_by_p_alone(p: Tensor, _q: Tensor, noise: Tensor) -> Tensor:
    return noise < p


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("leftover", resample_from_target),
        ("accepts", accept_always),
        ("accepts", accept_by_p_alone),
    ],
)
def test_a_wrong_rule_is_caught(
    part: str, wrong: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptors, part, wrong)
    drawn = drawn_by_rule(PROPOSED["skewed"], PLAIN)
    assert p_value(drawn, chain_distribution(PLAIN)) < ALPHA


def drafts_noise(seeds: Tensor, positions: Tensor) -> Tensor:
    """Uniform in (0, 1), but of the noise that the draft token was drawn with."""
    noise = gumbel_noise(seeds, positions, VOCAB_SIZE, Stream.DRAFT)[:, 0].double()
    return (-(-noise).exp()).exp()


@pytest.mark.parametrize(
    "shared", [{"noise": drafts_noise}, {"correction": Stream.DRAFT}], ids=["accepts", "corrects"]
)
def test_noise_shared_with_the_draft_is_caught(shared: dict[str, Any]) -> None:
    drawn = drawn_by_rule(PROPOSED["skewed"], PLAIN, **shared)
    assert p_value(drawn, chain_distribution(PLAIN)) < ALPHA


PROPOSERS: dict[str, MarkovProposer] = {
    "point mass": MarkovProposer(SKEWED * 1e4, CoupledDrawing()),
    "the target itself": MarkovProposer(TARGET, IndependentDrawing()),
    "skewed": MarkovProposer(SKEWED, IndependentDrawing()),
    "with zeros": MarkovProposer(WITH_ZEROS, IndependentDrawing()),
}


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("params", [PLAIN, CUT], ids=["plain", "top-k"])
@pytest.mark.parametrize("case", PROPOSERS)
def test_whole_drafts_are_judged_by_that_rule(
    case: str, params: SamplingParams, tells: bool
) -> None:
    proposer = replace(PROPOSERS[case], tells=tells)
    drawn = continuations(RejectionAcceptor(), proposer.propose, params, count=NUM_REQUESTS)
    proposed = step_distribution(params, proposer.logits)
    by_rule = drawn_by_rule(proposed, params, tells=tells, count=NUM_REQUESTS)
    assert torch.equal(drawn, by_rule)


@pytest.mark.parametrize("tells", [True, False])
def test_drafts_are_accepted_as_often_as_the_two_distributions_allow(tells: bool) -> None:
    proposer = replace(PROPOSERS["skewed"], tells=tells)
    requests = make_requests(4_000, SamplingParams())
    proposer.propose(requests)
    accepted = RejectionAcceptor().accept(requests, target_logits(requests))
    p, q = TARGET[0].softmax(-1), SKEWED[0].softmax(-1)
    # Told, 1 less their distance in total variation; a point mass is accepted by p alone.
    chance = torch.minimum(p, q).sum() if tells else (p * q).sum()
    is_accepted = torch.tensor([int(bool(entry.path)) for entry in accepted])
    assert p_value(is_accepted, torch.stack([1 - chance, chance])) > ALPHA


def test_a_draft_from_the_targets_own_distribution_is_always_accepted() -> None:
    requests = make_requests(1_000, SamplingParams(temperature=1.3, top_p=0.9))
    PROPOSERS["the target itself"].propose(requests)
    accepted = RejectionAcceptor().accept(requests, target_logits(requests))
    assert {len(entry.path) for entry in accepted} == {LENGTH}


def test_coupled_drawing_keeps_the_distribution_and_the_tokens() -> None:
    params = SamplingParams(temperature=1.3)
    proposer = MarkovProposer(SKEWED, CoupledDrawing())
    drawn = continuations(CoupledAcceptor(), proposer.propose, params, count=4_000)
    assert p_value(drawn, chain_distribution(params)) > ALPHA
    plain = continuations(CoupledAcceptor(), nobody, params, count=4_000)
    assert torch.equal(drawn, plain)


def test_coupled_drafts_are_accepted_as_often_as_gumbel_noise_lets_two_draws_meet() -> None:
    requests = make_requests(4_000, SamplingParams())
    MarkovProposer(SKEWED, CoupledDrawing()).propose(requests)
    accepted = CoupledAcceptor().accept(requests, target_logits(requests))
    p, q = TARGET[0].softmax(-1), SKEWED[0].softmax(-1)
    # Both draw token i if its noise beats that of every other in both: a race of exponentials.
    chance = (1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(-1)).sum()
    distance = (p - q).abs().sum() / 2
    assert (1 - distance) / (1 + distance) <= chance <= 1 - distance
    is_accepted = torch.tensor([int(bool(entry.path)) for entry in accepted])
    assert p_value(is_accepted, torch.stack([1 - chance, chance])) > ALPHA


def test_without_drafts_both_acceptors_draw_as_plain_decoding_does() -> None:
    requests = make_requests(200, SamplingParams(top_p=0.8))
    rows = [row_after(request, ()) for request in requests]
    plain = sample(target_logits(requests), rows)
    for acceptor in (CoupledAcceptor(), RejectionAcceptor()):
        accepted = acceptor.accept(requests, target_logits(requests))
        assert [entry.token_ids for entry in accepted] == [[token] for token in plain]


@pytest.mark.parametrize("case", PROPOSERS)
def test_a_greedy_answer_stays_what_it_is(case: str) -> None:
    params = SamplingParams(temperature=0.0)
    drawn = continuations(RejectionAcceptor(), PROPOSERS[case].propose, params, count=5)
    tokens = [0]
    for _ in range(LENGTH):
        tokens.append(int(TARGET[tokens[-1]].argmax()))
    assert drawn.tolist() == [int(numbered(torch.tensor(tokens[1:])))] * 5


def test_an_answer_does_not_hang_on_what_shares_its_batch() -> None:
    requests = make_requests(40, SamplingParams())
    PROPOSERS["skewed"].propose(requests)
    requests[7].draft = NO_DRAFT
    together = RejectionAcceptor().accept(requests, target_logits(requests))
    alone = [RejectionAcceptor().accept([r], target_logits([r]))[0] for r in requests]
    assert together == alone


def test_of_a_tree_the_branch_of_first_children_is_looked_at() -> None:
    #        0 ─ 2 ─ 4
    # root ─ 1 ─ 3          tokens: the same, and their chain 5, 3, 1
    chain, tree = (make_requests(300, SamplingParams()) for _ in range(2))
    for request, other in zip(chain, tree, strict=True):
        request.draft = Draft((5, 3, 1))
        other.draft = Draft((5, 2, 3, 0, 1), parents=(-1, -1, 0, 1, 2))
    of_chain = RejectionAcceptor().accept(chain, target_logits(chain))
    of_tree = RejectionAcceptor().accept(tree, target_logits(tree))
    assert [entry.token_ids for entry in of_tree] == [entry.token_ids for entry in of_chain]
    assert [entry.path for entry in of_tree] == [
        [(0, 2, 4)[index] for index in entry.path] for entry in of_chain
    ]
    assert {len(entry.path) for entry in of_tree} == {0, 1, 2, 3}


SERVED_LENGTH = 4
"""The first token of an answer comes from its prompt, the others may be drafted together."""
SERVED_PROMPT = [2, 5, 1]


@pytest.mark.parametrize(
    ("proposer", "acceptance", "count"),
    [("early_exit:1", Acceptance.REJECTION, 3_000), ("ngram", Acceptance.COUPLED, 1_500)],
)
def test_served_answers_have_the_distribution_of_the_dense_model(
    proposer: str, acceptance: Acceptance, count: int, toy_base: Path, tmp_path: Path
) -> None:
    engine = LocalEngine(
        toy_base,
        tmp_path,
        speculation=(proposer,),
        acceptance=acceptance,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_queued_per_tenant=count,
        max_queued=count,
    )
    for seed in range(count):
        engine.submit(
            SERVED_PROMPT,
            max_tokens=SERVED_LENGTH,
            temperature=1.3,
            seed=seed,
            speculation=SpeculationParams(num_tokens=LENGTH),
        )
    engine.run()
    engine.close()
    tokens = torch.tensor([answer.token_ids for answer in engine.answers.values()])
    ends = [answer.finished for answer in engine.answers.values()]
    assert sum(end.num_accepted_tokens for end in ends if end) > 100
    expected = dense_distribution(toy_base, temperature=1.3)
    assert p_value(numbered(tokens[:, 1:]), expected) > ALPHA


@pytest.fixture(scope="module")
def toy_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of so few tokens that all answers can be counted."""
    path = tmp_path_factory.mktemp("toy-base")
    return make_tiny_llama(
        path, vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=32, eos_token_id=None
    )


def dense_distribution(base: Path, *, temperature: float) -> Tensor:
    """Of all tokens of the answer but the first, by the model's own forward over all answers."""
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    digits = [torch.arange(VOCAB_SIZE)] * SERVED_LENGTH
    answers = torch.cartesian_prod(*digits)
    prompts = torch.tensor(SERVED_PROMPT).expand(len(answers), -1)
    with torch.inference_mode():
        logits = model(torch.cat([prompts, answers], 1)).logits[:, len(SERVED_PROMPT) - 1 : -1]
    steps = (logits.double() / temperature).softmax(-1).gather(-1, answers[..., None])[..., 0]
    by_first: Tensor = steps.prod(-1).view(VOCAB_SIZE, -1)
    return by_first.sum(0)
