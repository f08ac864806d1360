"""Sampling compared with exact probabilities and with transformers' logits processors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from loraplex.engine.errors import InvalidParameter
from loraplex.engine.execution import sampler
from loraplex.engine.execution.sampler import (
    SamplingRow,
    Stream,
    finite_rows,
    gumbel_noise,
    logprobs_of,
    perturbed,
    probabilities_of,
    ranks_of,
    row_after,
    sample,
)
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.token_counts import TokenCounts
from support.cpu_kernels import needs_cpu_library, remove_cpu_library

VOCAB_SIZE = 40
LOGITS = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 2


@pytest.fixture(params=[pytest.param("library", marks=needs_cpu_library), "torch"])
def _either_arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        remove_cpu_library(monkeypatch)


either_arithmetic = pytest.mark.usefixtures("_either_arithmetic")


def make_row(
    seed: int = 0,
    prompt: tuple[int, ...] = (1, 2),
    output: tuple[int, ...] = (),
    **params: Any,
) -> SamplingRow:
    sampling = SamplingParams(**params)
    counts = None
    if sampling.has_penalties:
        counts = TokenCounts(prompt)
        counts.follow([*prompt, *output])
    forbidden = () if sampling.limits_tokens else None
    position = len(prompt) + len(output)
    return SamplingRow(sampling, seed, position, counts, forbidden_tokens=forbidden)


def frequencies(count: int, **params: Any) -> Tensor:
    """How often each token is drawn over many seeds."""
    row = make_row(**params)
    rows = [replace(row, seed=seed) for seed in range(count)]
    tokens = sample(LOGITS.expand(count, -1), rows)
    return torch.bincount(torch.tensor(tokens), minlength=VOCAB_SIZE) / count


def assert_draws_from(probabilities: Tensor, **params: Any) -> None:
    (exact,) = probabilities_of(LOGITS[None], [make_row(**params)])
    torch.testing.assert_close(exact, probabilities)
    count = 10_000
    observed = frequencies(count, **params) * count
    expected = probabilities * count
    assert observed[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum().item()
    degrees = int(kept.sum()) - 1
    # Mean `degrees`, variance 2 × degrees: six standard deviations.
    assert chi_square <= degrees + 6 * (2 * degrees) ** 0.5


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert sample(LOGITS[None], [make_row(temperature=0.0)]) == [LOGITS.argmax().item()]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_tempered_distribution(temperature: float) -> None:
    assert_draws_from((LOGITS / temperature).softmax(-1), temperature=temperature)


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        ({"top_k": 5}, TopKLogitsWarper(5)),
        ({"top_k": 1}, TopKLogitsWarper(1)),
        ({"top_p": 0.7}, TopPLogitsWarper(0.7)),
        ({"top_p": 0.05}, TopPLogitsWarper(0.05)),
        ({"top_p": 0.0}, TopPLogitsWarper(0.0)),
        ({"min_p": 0.1}, MinPLogitsWarper(0.1)),
    ],
)
def test_truncation_equals_that_of_transformers(params: dict[str, Any], warper: Any) -> None:
    warped = warper(torch.zeros(1, 1, dtype=torch.int64), LOGITS[None].clone())[0]
    assert_draws_from(warped.softmax(-1), **params)


def test_the_limits_that_cut_nothing_cut_nothing() -> None:
    plain = frequencies(2000)
    assert torch.equal(frequencies(2000, top_k=VOCAB_SIZE), plain)
    assert torch.equal(frequencies(2000, top_p=1.0, min_p=0.0), plain)


@pytest.mark.parametrize(
    "params", [{"temperature": 1e-40}, {"temperature": 1e-6}, {"top_p": 1e-46}, {"top_k": 1}]
)
def test_the_smallest_values_mean_the_likeliest_token(params: dict[str, Any]) -> None:
    assert sample(LOGITS[None] * 50, [make_row(**params)]) == [LOGITS.argmax().item()]


def test_each_row_keeps_its_own_limits() -> None:
    rows = [
        make_row(1, top_k=1),
        make_row(2, temperature=0.0),
        make_row(3),
        make_row(4, top_p=0.5, top_k=3),
    ]
    together = sample(LOGITS.expand(4, -1).clone(), rows)
    assert together == [sample(LOGITS[None], [row])[0] for row in rows]


@either_arithmetic
def test_repetition_penalty_equals_that_of_transformers() -> None:
    prompt, output = (3, 4, 4), (7,)
    processor = RepetitionPenaltyLogitsProcessor(1.8)
    expected = processor(torch.tensor([[*prompt, *output]]), LOGITS[None].clone())[0].softmax(-1)
    assert_draws_from(expected, prompt=prompt, output=output, repetition_penalty=1.8)


@either_arithmetic
def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    adjusted = LOGITS.clone()
    adjusted[7] -= 0.5 + 2 * 0.25
    adjusted[9] -= 0.5 + 0.25
    assert_draws_from(
        adjusted.softmax(-1),
        prompt=(3, 3),
        output=(7, 9, 7),
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )


def test_only_allowed_tokens_are_drawn() -> None:
    adjusted = torch.full_like(LOGITS, float("-inf"))
    adjusted[[3, 5, 8]] = LOGITS[[3, 5, 8]]
    assert_draws_from(adjusted.softmax(-1), allowed_token_ids=(3, 5, 8))


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
def test_a_forbidden_token_is_drawn_only_where_a_grammar_allows_no_other(
    temperature: float,
) -> None:
    row = replace(make_row(temperature=temperature, bad_words=((3,),)), forbidden_tokens=(3, 999))
    likeliest = LOGITS.clone()
    likeliest[3] = LOGITS.max() + 5.0
    assert sample(likeliest[None], [row]) != [3]
    of_grammar = torch.full_like(LOGITS, float("-inf"))
    of_grammar[3] = LOGITS[3]
    assert sample(of_grammar[None], [row]) == [3]


def test_logit_bias_is_added() -> None:
    adjusted = LOGITS.clone()
    adjusted[3] += 4.0
    adjusted[5] -= 100.0
    assert_draws_from(adjusted.softmax(-1), logit_bias={3: 4.0, 5: -100.0})


@either_arithmetic
def test_penalties_and_biases_add_up_and_a_bias_is_not_penalized() -> None:
    row = make_row(
        output=(7,),
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={7: 3.0, 9: -1.0},
    )
    adjusted = LOGITS.clone()
    for token in (1, 2, 7):
        adjusted[token] *= 1 / 1.5 if adjusted[token] > 0 else 1.5
    adjusted[7] += 3.0 - 0.75
    adjusted[9] -= 1.0
    (probabilities,) = probabilities_of(LOGITS[None], [row])
    torch.testing.assert_close(probabilities, adjusted.softmax(-1))


@either_arithmetic
@pytest.mark.parametrize(
    ("params", "by_definition"),
    [
        ({"repetition_penalty": 2.0}, lambda x, _: x / 2.0 if x > 0 else x * 2.0),
        ({"repetition_penalty": 0.6}, lambda x, _: x / 0.6 if x > 0 else x * 0.6),
        ({"presence_penalty": 0.5}, lambda x, count: x - 0.5 * (count > 0)),
        ({"presence_penalty": -0.5}, lambda x, count: x + 0.5 * (count > 0)),
        ({"frequency_penalty": 0.25}, lambda x, count: x - 0.25 * count),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "expected",
)
def test_each_penalty_changes_the_tokens_of_its_row_alone(
    params: dict[str, Any], by_definition: Callable[[float, int], float]
) -> None:
    prompt, output = (1, 2, 4), (7, 10, 7)
    expected = LOGITS.clone()
    for token in {*prompt, *output}:
        expected[token] = by_definition(LOGITS[token].item(), output.count(token))
    assert {bool(LOGITS[token] > 0) for token in (*prompt, *output)} == {True, False}
    rows = [make_row(), make_row(prompt=prompt, output=output, **params), make_row()]
    plain, penalized, other = probabilities_of(LOGITS.expand(3, -1), rows)
    torch.testing.assert_close(penalized, expected.softmax(-1))
    assert torch.equal(plain, other)
    torch.testing.assert_close(plain, LOGITS.softmax(-1))


def test_a_row_without_temperature_is_certain_of_one_of_equal_tokens() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0]]).expand(2, -1)
    greedy, drawn = probabilities_of(logits, [make_row(temperature=0.0), make_row()])
    assert greedy.tolist() == [0.0, 1.0, 0.0]
    assert drawn[1] == drawn[2] < 0.5


def test_no_logit_overflows_at_any_temperature() -> None:
    logits = torch.tensor([[1e35, 2e35]])
    assert sample(logits, [make_row(temperature=1e-6)]) == [1]


def test_a_top_p_of_one_cuts_nothing_beside_a_smaller_one() -> None:
    logits = torch.tensor([0.0, -30.0, -31.0]).expand(2, -1)
    whole, cut = probabilities_of(logits, [make_row(top_p=1.0), make_row(top_p=0.5)])
    assert whole.gt(0).all()
    assert cut.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.95, 0.9999])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 4.0, 50.0])
def test_top_p_of_a_large_vocabulary_keeps_what_a_sort_would_and_equal_tokens(
    scale: float, top_p: float
) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2, 20_000, generator=generator) * scale
    logits[:, ::7] = float("-inf")  # what a grammar forbids
    probabilities = logits[0].softmax(-1)
    values = probabilities.double().sort(descending=True).values
    num_kept = max(int(((values.cumsum(-1) - values) < top_p).sum()), 1)
    kept, _ = probabilities_of(logits, [make_row(top_p=top_p), make_row()])
    expected = logits[0].masked_fill(probabilities < values[num_kept - 1], float("-inf"))
    torch.testing.assert_close(kept, expected.softmax(-1))


def test_the_limit_of_top_p_is_the_same_with_a_sort_of_all_rows_as_on_a_gpu() -> None:
    logits = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(6))
    probabilities = (logits * torch.tensor([0.1, 1.0, 3.0, 9.0])[:, None]).softmax(-1)
    top_p = [0.9, 0.5, 0.99, 0.7]
    limits = torch.tensor(top_p, dtype=torch.float64)[:, None]
    by_sort = sampler._least_by_sort(probabilities, limits)[:, 0]
    rows = zip(probabilities, top_p, strict=True)
    assert by_sort.tolist() == [sampler._least_by_pivots(*row).item() for row in rows]


def test_top_p_does_not_depend_on_the_rows_beside_it() -> None:
    logits = torch.randn(5, 20_000, generator=torch.Generator().manual_seed(5))
    rows = [make_row(seed, top_p=0.2 * (seed + 1)) for seed in range(5)]
    together = probabilities_of(logits, rows)
    for index, row in enumerate(rows):
        assert torch.equal(probabilities_of(logits[index][None], [row])[0], together[index])


def test_a_draw_depends_on_seed_and_position_and_on_nothing_else() -> None:
    row = make_row(seed=11, prompt=(0,) * 3)
    alone = sample(LOGITS[None], [row])
    crowd = [make_row(seed=s, prompt=(0,) * p) for s in range(6) for p in range(6)]
    logits = torch.randn(len(crowd) + 1, VOCAB_SIZE)
    logits[20] = LOGITS
    crowd.insert(20, row)
    assert sample(logits, crowd)[20] == alone[0]
    draws = {
        sample(LOGITS[None], [make_row(seed=s, prompt=(0,) * p)])[0]
        for s in range(9)
        for p in range(9)
    }
    assert len(draws) > 5


def test_a_row_stands_behind_its_request_s_tokens_and_the_drafted_ones() -> None:
    def request(**sampling: Any) -> Request:
        submitted = GenerationRequest("r", "acme", [4, 4, 7], SamplingParams(**sampling))
        request = Request(submitted, CacheNamespace("acme", "runtime", None), 11, 0.0, None)
        request.token_ids.append(7)
        return request

    plain = request(top_k=3)
    row = row_after(plain, [5, 6])
    assert row == SamplingRow(plain.submitted.sampling, 11, 6, None, [5, 6])
    assert row_after(plain).position == 4
    penalized = row_after(request(presence_penalty=1.0), [5]).counts
    assert penalized is not None
    counted = penalized.counted([5])
    assert set(counted.token_ids.tolist()) == {4, 5, 7}
    in_output = zip(counted.output_ids.tolist(), counted.num_in_output.tolist(), strict=True)
    assert dict(in_output) == {7: 1.0, 5: 1.0}


def test_no_noise_is_added_to_a_row_without_temperature() -> None:
    logits = LOGITS.expand(2, -1)
    greedy, drawn = perturbed(logits, [make_row(temperature=0.0), make_row()])
    assert torch.equal(greedy, LOGITS)
    assert not torch.equal(drawn, LOGITS)


def test_many_rows_are_drawn_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(8, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    rows = [make_row(seed, temperature=seed % 3) for seed in range(8)]
    together = sample(logits, rows)
    monkeypatch.setattr(sampler, "MAX_DRAWN_CELLS_ON_CPU", 3 * VOCAB_SIZE)
    monkeypatch.setattr(sampler, "perturbed", spy := Mock(side_effect=sampler.perturbed))
    assert sample(logits, rows) == together
    assert [len(call.args[0]) for call in spy.call_args_list] == [3, 3, 2]
    assert sample(logits[:0], []) == []


def test_the_logits_are_left_as_they_were() -> None:
    logits = LOGITS.expand(2, -1).clone()
    before = logits.clone()
    sample(logits, [make_row(logit_bias={1: 9.0}), make_row(temperature=0.7, top_k=2)])
    assert torch.equal(logits, before)


@either_arithmetic
def test_noise_is_that_of_splitmix64_in_plain_integers() -> None:
    seeds, positions = [0, 5, -(1 << 63), (1 << 63) - 1], [0, 1, 31_999, (1 << 40)]
    noise = gumbel_noise(torch.tensor(seeds), torch.tensor(positions), 100, Stream.DRAFT)
    for row, seed, position in zip(noise, seeds, positions, strict=True):
        counter = position + 1 + (Stream.DRAFT << 48)
        key = split_mix(split_mix(seed) ^ split_mix(counter))
        for token, value in enumerate(row.tolist(), start=1):
            bits = split_mix(key + token * 0x9E3779B97F4A7C15) >> 41
            uniform = (bits + 0.5) / (1 << 23)
            assert value == pytest.approx(-math.log(-math.log(uniform)), rel=1e-5, abs=1e-6)


def split_mix(number: int) -> int:
    """The finalizer of SplitMix64, of an integer modulo 2**64."""
    number %= 1 << 64
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % (1 << 64)
    return number ^ (number >> 31)


@either_arithmetic
def test_the_extreme_numbers_give_finite_noise() -> None:
    seeds = torch.tensor([seed_that_draws(0, token=3), seed_that_draws((1 << 23) - 1, token=3)])
    noise = gumbel_noise(seeds, torch.tensor([0, 0]), 3)
    lowest, highest = noise[:, 2].tolist()
    assert lowest == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)
    assert highest == pytest.approx(24 * math.log(2), rel=1e-6)


def seed_that_draws(bits: int, token: int) -> int:
    """The seed with which the token-th number at position 0 has these bits."""
    key = (unsplit_mix(bits << 41) - token * 0x9E3779B97F4A7C15) % (1 << 64)
    seed = unsplit_mix(unsplit_mix(key) ^ split_mix(1))
    return seed - (seed >> 63 << 64)


def unsplit_mix(number: int) -> int:
    """The number whose `split_mix` this is."""
    number ^= number >> 31 ^ number >> 62
    number = number * pow(0x94D049BB133111EB, -1, 1 << 64) % (1 << 64)
    number ^= number >> 27 ^ number >> 54
    number = number * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) % (1 << 64)
    return number ^ (number >> 30) ^ (number >> 60)


@needs_cpu_library
def test_the_library_draws_the_same_noise_for_any_vocabulary_on_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds, positions = torch.tensor([3, -9]), torch.tensor([0, 77])
    ours = gumbel_noise(seeds, positions, 9_001)
    for vocab_size in (1, 7, 255, 257, 4_097):
        assert torch.equal(gumbel_noise(seeds, positions, vocab_size), ours[:, :vocab_size])
    for num_threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=num_threads: number)
        assert torch.equal(gumbel_noise(seeds, positions, 9_001), ours)
    remove_cpu_library(monkeypatch)
    plain = gumbel_noise(seeds, positions, 9_001)
    torch.testing.assert_close(ours, plain, rtol=3e-7, atol=3e-7)


@needs_cpu_library
def test_the_library_penalizes_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    params: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.11,
    }
    row = make_row(prompt=(*range(30),), output=(3, 3, 35, 3, 36), temperature=0.0, **params)
    ours = perturbed(LOGITS[None], [row])
    remove_cpu_library(monkeypatch)
    assert torch.equal(ours, perturbed(LOGITS[None], [row]))


@either_arithmetic
def test_noise_is_gumbel_and_independent_between_counters() -> None:
    seeds = torch.tensor([0, 1, -1, 2**62, 12345])
    noise = gumbel_noise(seeds, torch.zeros(5, dtype=torch.int64), 50_000)
    assert noise.isfinite().all()
    assert (noise.mean(-1) - 0.5772).abs().max() < 0.03
    assert (noise.var(-1) - 1.6449).abs().max() < 0.06
    shifted = gumbel_noise(seeds, torch.ones(5, dtype=torch.int64), 50_000)
    rows = torch.cat([noise, shifted])
    correlation = torch.corrcoef(rows) - torch.eye(10)
    assert correlation.abs().max() < 0.03


def test_logprobs_are_those_of_the_unmodified_distribution() -> None:
    logits = torch.stack([LOGITS, -LOGITS])
    expected = logits.log_softmax(-1)
    entries = logprobs_of(logits, [3, 4], 2)
    for row, (token, entry) in enumerate(zip([3, 4], entries, strict=True)):
        assert entry.chosen.token_id == token
        assert entry.chosen.logprob == pytest.approx(expected[row, token].item())
        best = expected[row].topk(2)
        assert [part.token_id for part in entry.top] == best.indices.tolist()
        assert [part.logprob for part in entry.top] == pytest.approx(best.values.tolist())


def test_as_many_logprobs_as_there_are_tokens_are_told_at_most() -> None:
    (entry,) = logprobs_of(torch.zeros(1, 3), [1], 20)
    assert len(entry.top) == 3


def test_a_row_is_finite_if_every_logit_is_a_number() -> None:
    logits = torch.randn(6, VOCAB_SIZE)
    logits[1, 3], logits[2, 0], logits[3, -1] = float("nan"), float("inf"), -float("inf")
    logits[4] = torch.finfo(torch.float32).max
    logits[5] = -torch.finfo(torch.float32).max
    assert finite_rows(logits).tolist() == [True, False, False, False, True, True]
    out = torch.zeros(6, dtype=torch.bool)
    assert finite_rows(logits, out=out) is out
    assert torch.equal(out, logits.isfinite().all(-1))


def test_a_token_s_rank_counts_those_that_are_likelier() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]]).expand(4, -1)
    assert ranks_of(logits, [0, 1, 2, 3]) == [4, 1, 1, 3]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.5),
        ("repetition_penalty", 1e-3),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", 1 << 63),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", dict.fromkeys(range(301), 1.0)),
        ("num_logprobs", 21),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param.removeprefix("num_")
